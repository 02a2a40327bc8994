"""The adapter for the tinker SDK: its HTTP API under `/api/v1`."""

from cookbook.serve.adapters.tinker.adapter import TINKER

__all__ = ["TINKER"]
