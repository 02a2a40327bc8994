"""Loggers: sinks for metrics besides the run directory, chosen by `logger=<name>` (conf/logger/<name>.yaml)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

from cookbook.core.errors import ConfigError
from cookbook.core.rollouts import Metrics
from cookbook.tracking.records import plain

if TYPE_CHECKING:
    import wandb
    from torch.utils.tensorboard.writer import SummaryWriter

T = TypeVar("T")

WandbMode = Literal["auto", "online", "offline"]

COMPLETED = "completed"
"""The `status` of a successful run in its summary."""


class Logger(Protocol):
    """A metrics sink. Calls come in this order: `check`, `start`, any number of `log`, `finish`."""

    def check(self) -> None:
        """Called before any compute is started. Raises ConfigError if a package or a login is missing."""
        ...

    def start(self, run_dir: Path, config: Mapping[str, Any], next_step: int) -> str:
        """Open the sink; `next_step` above 0 continues an earlier run. Returns a line for the console, or ""."""
        ...

    def log(self, step: int, metrics: Metrics) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


class NoLogger:
    """No logger: the run directory is the only record."""

    def check(self) -> None:
        pass

    def start(self, run_dir: Path, config: Mapping[str, Any], next_step: int) -> str:
        return ""

    def log(self, step: int, metrics: Metrics) -> None:
        pass

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass


class WandbLogger:
    """Weights & Biases. `<run_dir>/wandb_run_id` keeps the run id, so that a resumed run continues the same W&B run.

    Mode "auto" follows the environment variable WANDB_MODE if it is set; otherwise it is online with a login
    (WANDB_API_KEY or a netrc entry) and offline without one. An offline run stays in `<run_dir>/wandb` until
    `wandb sync` uploads it.
    """

    def __init__(
        self,
        project: str,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: WandbMode = "auto",
    ) -> None:
        self._project = project
        self._entity = entity
        self._name = name
        self._group = group
        self._tags = tuple(tags)
        self._mode: WandbMode = mode
        self._run: wandb.Run | None = None

    def check(self) -> None:
        require_package("wandb", "pip install wandb")
        if self._mode not in ("auto", "online", "offline"):
            raise ConfigError(f"logger.mode is {self._mode!r}; it must be auto, online or offline")
        if self.resolved_mode() == "online" and not wandb_login():
            raise ConfigError(
                "logger.mode: W&B is online, but there is no login; run `wandb login`, set WANDB_API_KEY, "
                "or use logger.mode=offline"
            )

    def resolved_mode(self) -> Literal["online", "offline", "disabled"]:
        """The mode that "auto" selects. Raises ConfigError for an unknown WANDB_MODE."""
        if self._mode != "auto":
            return self._mode
        match os.environ.get("WANDB_MODE"):
            case None:
                return "online" if wandb_login() else "offline"
            case "online":
                return "online"
            case "offline":
                return "offline"
            case "disabled":
                return "disabled"
            case other:
                raise ConfigError(
                    f"the environment variable WANDB_MODE is {other!r}; it must be online, offline or disabled"
                )

    def start(self, run_dir: Path, config: Mapping[str, Any], next_step: int) -> str:
        import wandb

        mode = self.resolved_mode()
        id_path = run_dir / "wandb_run_id"
        known_id = id_path.read_text().strip() if next_step > 0 and id_path.exists() else None
        try:
            self._run = wandb.init(
                project=self._project,
                entity=self._entity,
                name=self._name or run_dir.name,
                group=self._group,
                tags=self._tags,
                dir=run_dir,
                id=known_id,
                resume="allow" if known_id and mode == "online" else None,
                mode=mode,
                config=dict(config),
                # console.log has these lines already, and W&B's messages would break the progress bar.
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            reason = str(error).strip().splitlines()
            raise ConfigError(
                f"logger: W&B did not start ({reason[0] if reason else type(error).__name__}); "
                "run `wandb login` or use logger.mode=offline"
            ) from error
        if mode != "disabled":
            id_path.write_text(self._run.id + "\n")
        # The step is a metric of its own: W&B's counter refuses steps that a resumed run logs again.
        self._run.define_metric("*", step_metric="step")
        if mode == "online":
            return f"W&B: {self._run.url}"
        return f"W&B: {mode}, run {self._run.id}" + (
            f"; upload it with: wandb sync {run_dir / 'wandb'}/offline-run-*" if mode == "offline" else ""
        )

    def log(self, step: int, metrics: Metrics) -> None:
        started(self._run).log({"step": step, **metrics})

    def finish(self, summary: Mapping[str, Any]) -> None:
        run = started(self._run)
        run.summary.update(dict(summary))
        run.finish(exit_code=0 if summary.get("status") == COMPLETED else 1)


class TensorBoardLogger:
    """TensorBoard event files in `<run_dir>/tensorboard`. TensorBoard discards events that a resumed run logs again."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def check(self) -> None:
        require_package("tensorboard", "pip install -e '.[tensorboard]'")

    def start(self, run_dir: Path, config: Mapping[str, Any], next_step: int) -> str:
        from torch.utils.tensorboard.writer import SummaryWriter

        folder = run_dir / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=next_step)
        self._writer.add_text("config", indented_json(config), next_step)
        return f"TensorBoard: tensorboard --logdir {folder}"

    def log(self, step: int, metrics: Metrics) -> None:
        writer = started(self._writer)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        writer = started(self._writer)
        writer.add_text("summary", indented_json(summary))
        writer.close()


class TrackioLogger:
    """Trackio, the local-first tracker of Hugging Face: a local database, or the Space `space_id`.

    The Trackio run has the name of the run directory; a resumed run continues it.
    """

    def __init__(self, project: str, space_id: str | None = None) -> None:
        self._project = project
        self._space_id = space_id
        self._run: Any = None  # trackio ships without types

    def check(self) -> None:
        require_package("trackio", "pip install -e '.[trackio]'")

    def start(self, run_dir: Path, config: Mapping[str, Any], next_step: int) -> str:
        self._run = importlib.import_module("trackio").init(
            project=self._project,
            name=run_dir.name,
            space_id=self._space_id,
            config=dict(config),
            resume="allow" if next_step > 0 else "never",
            embed=False,
        )
        return f"Trackio: trackio show --project {self._project}"

    def log(self, step: int, metrics: Metrics) -> None:
        started(self._run).log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        started(self._run).finish()


def require_package(package: str, remedy: str) -> None:
    """Raises ConfigError unless `package` is installed. A folder without code, such as `./wandb`, does not count."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"logger: the package {package} is not installed; install it with: {remedy}")


def started(sink: T | None) -> T:
    if sink is None:
        raise RuntimeError("Logger.start must come before log and finish")
    return sink


def wandb_login() -> bool:
    """Whether W&B finds credentials: in the environment, or in the netrc file for the host of WANDB_BASE_URL.

    Raises:
        ConfigError: the netrc file cannot be read.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    path = Path(os.environ.get("NETRC") or Path.home() / ("_netrc" if os.name == "nt" else ".netrc"))
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except FileNotFoundError:
        return False
    except (netrc.NetrcParseError, OSError) as error:
        raise ConfigError(
            f"logger: {path} cannot be read as a netrc file ({error}); fix it, or use logger.mode=offline"
        ) from error


def indented_json(values: Mapping[str, Any]) -> str:
    """JSON as a Markdown code block: every line is indented by four spaces."""
    return "\n".join(f"    {line}" for line in json.dumps(values, indent=2, default=plain).splitlines())
