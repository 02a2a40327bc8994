"""Where programs that nobody trusts are run: see docs/sandbox.md for what holds them, and what does not."""
