"""The adapter for the tinker SDK: its HTTP API under `/api/v1`, on the core of `cookbook.serve`."""

from cookbook.serve.adapters.tinker.routes import tinker_routes

__all__ = ["tinker_routes"]
