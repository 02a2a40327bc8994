"""Errors that the user can fix.

Each prints as one line that says what was wrong, where, and what to do.
`cookbook.run` shows that line and exits with status 1; `debug=true` also shows the traceback.
"""


class CookbookError(Exception):
    """Base of all errors that the user can fix. The message is one complete line."""


class ConfigError(CookbookError):
    """A configuration value is missing, unknown or inconsistent with another one."""


class DataError(CookbookError):
    """A dataset, a row of it, or a datum built from it is malformed."""


class CapabilityError(CookbookError):
    """The chosen backend cannot do what the recipe asks for."""


class BackendError(CookbookError):
    """A backend operation failed, or a client was used after `stop()`."""


class CheckpointError(CookbookError):
    """A checkpoint or run directory is missing, incomplete or belongs to another configuration."""


class LossError(CookbookError):
    """A custom loss raised, returned something else than (scalar tensor, metrics), or has no gradient."""


class RewardError(CookbookError):
    """A reward function failed in a way that says nothing about the completion it was scoring."""
