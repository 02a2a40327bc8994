"""Reward functions: one module per family. The contract is `cookbook.core.rollouts.Reward`; docs/rewards.md shows how to write one."""
