"""The tinker backend: our clients over the published tinker SDK, against Tinker, our own server, or any drop-in module."""

from cookbook.backends.tinker.service import TinkerService

__all__ = ["TinkerService"]
