"""Reward functions, one module per family. docs/rewards.md shows how to write one (`cookbook.core.rollouts.Reward`)."""
