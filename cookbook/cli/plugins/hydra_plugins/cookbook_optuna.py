"""The sweeper of `hydra/sweeper=optuna`, in the namespace package that Hydra loads plugins from."""

from cookbook.cli import optuna_sweeper


class OptunaSweeper(optuna_sweeper.OptunaSweeper):
    """See `cookbook.cli.optuna_sweeper`."""
