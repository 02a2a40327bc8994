"""Reward functions: one module per family. The contract is `cookbook.types.Reward`; docs/rewards.md shows how to write one."""
