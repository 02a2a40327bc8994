"""The local backend: torch + transformers + peft in this process, on CPU, CUDA or MPS."""

from cookbook.backends.local.service import LocalService

__all__ = ["LocalService"]
