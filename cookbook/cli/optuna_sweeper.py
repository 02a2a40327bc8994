"""A Hydra sweeper over Optuna: `-m hydra/sweeper=optuna`. A trial is a run; what it returns is the objective."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from cookbook.core.callables import one_line
from cookbook.core.errors import ConfigError
from cookbook.tracking import write_atomically

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

RESULTS_FILE = "optimization_results.yaml"

PLUGINS = Path(__file__).parent / "plugins"
"""Holds a part of the namespace package `hydra_plugins`: Hydra accepts plugins from nowhere else."""


def register() -> None:
    """Make the sweeper known to Hydra, also in the processes that a launcher starts: they inherit sys.path."""
    if str(PLUGINS) not in sys.path:
        sys.path.append(str(PLUGINS))
    Plugins.instance().register(importlib.import_module("hydra_plugins.cookbook_optuna").OptunaSweeper)


class OptunaSweeper(Sweeper):
    """Runs trials whose settings Optuna's TPE sampler proposes (Bergstra et al., NeurIPS 2011).

    `interval(a, b)` is a number in [a, b], and `int(interval(a, b))` an integer; `range(a, b, step)` is one of its
    numbers, without b; `choice(a, b)` and `a,b` are one of the values. `tag(log, interval(a, b))` is searched on a
    logarithmic scale. Every other override is the same for all trials.

    A run that fails or returns nothing is a failed trial. The others still run, and `sweep` raises at the end.
    """

    def __init__(
        self,
        n_trials: int,
        n_jobs: int,
        direction: str,
        seed: int | None,
        storage: str | None,
        study_name: str,
        params: dict[str, Any],
    ) -> None:
        """
        Args:
            n_trials: completed trials that the study is to have. A trial that fails is not replaced.
            n_jobs: trials proposed and launched together.
            direction: "maximize" or "minimize".
            seed: of the proposals; None draws one.
            storage: the URL of a database that keeps the study; None keeps it in memory.
            study_name: the study in the storage.
            params: overrides as on the command line, which wins over them.
        """
        self.n_trials, self.n_jobs, self.direction, self.seed = n_trials, n_jobs, direction, seed
        self.storage, self.study_name, self.params = storage, study_name, params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        for name, count in (("n_trials", self.n_trials), ("n_jobs", self.n_jobs)):
            if count < 1:
                raise ConfigError(f"hydra.sweeper.{name}={count}: must be at least 1")
        if self.direction not in ("maximize", "minimize"):
            raise ConfigError(f"hydra.sweeper.direction={self.direction}: must be maximize or minimize")
        self._optuna = _optuna()
        self.hydra_context, self.config = hydra_context, config
        self._loader = hydra_context.config_loader
        self._launcher = self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        self._first_error: Exception | None = None

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials, print the best one and write all of them to RESULTS_FILE in the sweep's folder.

        Raises:
            ConfigError: there is nothing to search, or an override cannot be searched.
            Exception: that of the first run that failed, after the last run has ended.
        """
        parser = OverridesParser.create(config_loader=self._loader)
        given = parser.parse_overrides([*(f"{key}={value}" for key, value in self.params.items()), *arguments])
        overrides = {override.get_key_element(): override for override in given}
        fixed = [str(override.input_line) for override in overrides.values() if not override.is_sweep_override()]
        space = {key: _distribution(override) for key, override in overrides.items() if override.is_sweep_override()}
        if not space:
            raise ConfigError(
                "hydra/sweeper=optuna: there is nothing to search; add a setting such as "
                "'optim.learning_rate=interval(1e-5,1e-2)'"
            )

        study = self._study()
        launched, remaining = 0, self.n_trials - len(_completed(study))
        while remaining > 0:
            trials = self._propose(study, space, min(self.n_jobs, remaining))
            launched += self._launch(study, trials, fixed, launched)
            remaining -= len(trials)
        if _completed(study):
            _report(study)
        if self._first_error is not None:
            raise self._first_error

    def _study(self) -> Study:
        optuna = self._optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            study = optuna.create_study(
                storage=self.storage, study_name=self.study_name, direction=self.direction, load_if_exists=True
            )
        except Exception as error:  # which one depends on the database
            raise ConfigError(
                f"hydra.sweeper.storage={self.storage}: cannot be used ({one_line(str(error))}); "
                "give a URL such as sqlite:///study.db"
            ) from error
        # A continued study must not propose its first values again.
        seed = None if self.seed is None else self.seed + len(study.trials)
        study.sampler = optuna.samplers.TPESampler(seed=seed)
        return study

    def _propose(self, study: Study, space: Mapping[str, BaseDistribution], number: int) -> list[Trial]:
        try:
            return [study.ask(dict(space)) for _ in range(number)]
        except ValueError as error:
            raise ConfigError(
                f"hydra.sweeper.study_name={self.study_name}: holds trials of another search ({one_line(str(error))}); "
                "choose another name"
            ) from error

    def _launch(self, study: Study, trials: Sequence[Trial], fixed: Sequence[str], launched: int) -> int:
        """Run a batch of trials and tell the study. Returns the number of jobs: equal trials share one."""
        proposed = [(*fixed, *_settings(trial.params)) for trial in trials]
        jobs = list(dict.fromkeys(proposed))
        self.validate_batch_is_legal(jobs)
        results = dict(zip(jobs, self._launcher.launch(jobs, initial_job_idx=launched), strict=True))
        for trial, settings in zip(trials, proposed, strict=True):
            self._tell(study, trial, results[settings])
        return len(jobs)

    def _tell(self, study: Study, trial: Trial, result: JobReturn) -> None:
        from optuna.trial import TrialState

        settings = " ".join(_settings(trial.params))
        try:
            value = result.return_value
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"{settings}: the run returned {value}, which cannot be optimized")
        except Exception as error:  # whatever ended the run
            self._first_error = self._first_error or error
            study.tell(trial, state=TrialState.FAIL)
        else:
            assert result.cfg is not None
            trial.set_user_attr("run_dir", result.cfg.run_dir)
            study.tell(trial, value)


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            f"hydra/sweeper=optuna: needs the package optuna ({error}); install it with pip install 'optuna>=4,<5'"
        ) from error
    return optuna


def _distribution(override: Override) -> BaseDistribution:
    """What Optuna draws an override's value from."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if not isinstance(value, IntervalSweep | RangeSweep):
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    try:
        if isinstance(value, RangeSweep):
            numbers = list(value.range())
            step = abs(value.step)
        else:
            numbers = [number for number in (value.start, value.end) if number is not None]
            step = None
        low, high, log = min(numbers), max(numbers), "log" in value.tags
        if isinstance(low, int) and isinstance(high, int):
            return IntDistribution(low, high, log=log, step=int(step or 1))
        return FloatDistribution(low, high, log=log, step=step)
    except ValueError as error:
        raise ConfigError(
            f"{override.input_line}: cannot be searched ({error}); change its bounds, step or tag"
        ) from error


def _settings(params: Mapping[str, Any]) -> list[str]:
    """A trial's values as overrides."""
    return [f"{key}={value}" for key, value in params.items()]


def _completed(study: Study) -> list[FrozenTrial]:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])


def _report(study: Study) -> None:
    """Print the best trial, and write all trials into the folder that holds their runs."""
    best, number = study.best_trial, len(_completed(study))
    file = Path(best.user_attrs["run_dir"]).parent / RESULTS_FILE
    results = {
        "direction": study.direction.name.lower(),
        "best": _record(best),
        "trials": [_record(trial) for trial in study.get_trials(deepcopy=False)],
    }
    write_atomically(file, yaml.safe_dump(results, sort_keys=False, allow_unicode=True).encode())
    table = Table("trial", "objective", "settings", title=f"best of {number} trials", title_justify="left")
    table.add_row(str(best.number), f"{best.value:.6g}", " ".join(_settings(best.params)))
    Console().print(table)
    print(f"all trials: {file}")


def _record(trial: FrozenTrial) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "state": trial.state.name.lower(),
        "objective": trial.value,
        "settings": _settings(trial.params),
        "run_dir": trial.user_attrs.get("run_dir"),
    }
