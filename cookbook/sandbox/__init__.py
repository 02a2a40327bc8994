"""Sandboxes: places to run untrusted programs within limits. docs/sandbox.md describes what contains a program."""
