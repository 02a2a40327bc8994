"""The tinker backend: clients over the published tinker SDK, for Tinker, our own server, or a drop-in module."""

from cookbook.backends.tinker.service import TinkerService

__all__ = ["TinkerService"]
