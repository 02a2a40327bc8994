"""The local backend: torch + transformers + peft in this process, on CPU, CUDA or MPS."""

from cookbook.backends.base_models import check_base_model
from cookbook.backends.local.service import LocalService

__all__ = ["LocalService", "check_base_model"]
