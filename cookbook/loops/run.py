"""One run in progress: begins or resumes it, saves checkpoints, records evaluations, and writes the summary."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from cookbook.core import interrupts
from cookbook.core.clients import APIFuture, SamplingClient, ServiceClient, TrainingClient
from cookbook.core.errors import BackendError, CheckpointError, CookbookError
from cookbook.core.rollouts import Metrics
from cookbook.core.seeds import derive_seed
from cookbook.core.types import AdamParams, OptimStepResponse
from cookbook.data.curriculum import Curriculum
from cookbook.data.fingerprint import Fingerprint, compare, fingerprint
from cookbook.data.rendering import Renderer
from cookbook.loops.common import CommonComponents
from cookbook.loops.config import RunConfig
from cookbook.loops.rows import BAD_ROWS_FILE, RowCheck
from cookbook.rl.rollouts import Rollouts
from cookbook.tracking import Tracker
from cookbook.tracking.checkpoints import Checkpoint, CheckpointLog
from cookbook.tracking.console import OutputClosed
from cookbook.tracking.cost import BudgetExceeded, TokenLedger, cost_usd

REFERENCE_FILE = "reference_logprobs.jsonl"
"""The reference's logprobs, which a run that begins anew must not take over from another one."""

HEADLINES = ("accuracy", "nll", "loss")
"""Metrics of an evaluation that can say how good a run is; the first one that an evaluation has is its headline."""


@dataclass
class Run:
    """What is trained, and all that is recorded about it."""

    config: RunConfig
    service: ServiceClient
    clients: dict[str, TrainingClient]
    renderer: Renderer
    tracker: Tracker
    total_steps: int
    checkpoint: Checkpoint | None
    next_step: int = 0
    ledger: TokenLedger = field(default_factory=TokenLedger)
    evaluations: dict[str, Metrics] = field(default_factory=dict)
    seconds_before: float = 0.0
    started: float = field(default_factory=time.monotonic)
    curriculum: Curriculum | None = None
    dataset: Fingerprint = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)
    """How many rows of each split the run uses, and how many it left out, by reason."""

    saved_step: int | None = None
    """The next step of the newest checkpoint."""

    weights_ahead: bool = False
    """Whether the weights are no longer those of the last completed step."""

    def __post_init__(self) -> None:
        self._completed: dict[str, Any] = {}

    @property
    def policy(self) -> TrainingClient:
        return self.clients["policy"]

    def create_critic(self) -> TrainingClient:
        """A training client with a value head, from the checkpoint if there is one; saved along with the policy."""
        if self.checkpoint:
            client = self.service.create_training_client_from_state(
                self.checkpoint.states["critic"], with_optimizer=True
            )
        else:
            lora, seed = self.config.lora, derive_seed(self.config.seed, "critic")
            client = self.service.create_lora_training_client(
                self.config.model.base_model, lora.rank, lora.alpha, seed, role="critic"
            )
        self.clients["critic"] = client
        return client

    @property
    def wall_s(self) -> float:
        """Seconds of work, including those of earlier processes of the same run."""
        return self.seconds_before + time.monotonic() - self.started

    @property
    def objective(self) -> float | None:
        """The headline metric of the evaluation after training, negated for a loss: more is better. For sweepers.

        None where nothing was evaluated.
        """
        after = self.evaluations.get("after", {})
        for name in HEADLINES:
            if name in after:
                return after[name] if name == "accuracy" else -after[name]
        return None

    def set_total_steps(self, total_steps: int) -> None:
        """Set how many steps the run takes, where it is known only once the rows are checked.

        Raises:
            CheckpointError: the run has taken more already.
        """
        check_steps(total_steps, self.next_step, self.config.run_dir)
        self.total_steps = total_steps
        self.tracker.set_total_steps(total_steps)

    def use_curriculum(self, curriculum: Curriculum) -> None:
        """Choose problems by a curriculum, brought to where the checkpoint left it and saved with every further one."""
        self.curriculum = curriculum
        if self.checkpoint:
            curriculum.restore(self.checkpoint.loop_state["curriculum"])
        self._remember()

    def report_rows(self, check: RowCheck[Any], used: Mapping[str, int | None], dataset: Any, plan: str = "") -> None:
        """Say how many rows of each split are used, which are left out and why, and how the steps go through them.

        Args:
            used: of each split; None: every row is checked when it is drawn.
        """
        found = {split: check.found(split, getattr(dataset, split)) for split in used}
        self.rows = {split: {"used": used[split], "of": found[split]} for split in used}
        self.rows["skipped"] = check.skipped.counts
        each = [
            f"{found[split]:,} {split} rows, each checked when it is drawn"
            if number is None
            else f"{number:,} of {found[split]:,} {split} rows"
            for split, number in used.items()
        ]
        skipped = f"; {check.skipped}; all in {BAD_ROWS_FILE}" if check.skipped.total else ""
        self.tracker.say(f"dataset: {', '.join(each)}{skipped}")
        if plan:
            self.tracker.say(plan)
        check.write()

    def record_rollouts(self, step: int, rollouts: Rollouts) -> None:
        self.ledger.add(prefill=rollouts.num_prefill_tokens, sampled=rollouts.num_sampled_tokens)
        self.tracker.log_rollouts(step, rollouts.groups)

    def evaluation_due(self, step: int) -> bool:
        """Whether to evaluate before this step: before the first one, and every `eval.every` steps."""
        every = self.config.eval.every
        return step == 0 or (every > 0 and step % every == 0)

    def record_evaluation(self, step: int, metrics: Metrics) -> None:
        """Record an evaluation after `step` steps; the summary keeps those before the first and after the last."""
        when: Literal["before", "step", "after"] = "after" if step == self.total_steps else "step" if step else "before"
        if when != "step":
            self.evaluations[when] = metrics
        self.tracker.log_evaluation(when, step, metrics)

    def begin(self) -> None:
        """Continue where the checkpoint left off, if there is one."""
        if self.checkpoint:
            state = self.checkpoint.loop_state
            self.ledger = TokenLedger.from_dict(state["tokens"])
            self.evaluations = state["evaluations"]
            self.seconds_before = state["wall_s"]
        self._remember()

    def optim_step(self, params: AdamParams, role: str = "policy") -> APIFuture[OptimStepResponse]:
        """Enqueue an optimizer step of a client. An interrupt now waits for the end of this step of the loop, because
        the weights are no longer those of the last completed one."""
        interrupts.shield()
        self.weights_ahead = True
        return self.clients[role].optim_step(params)

    def _remember(self) -> None:
        """Keep what a checkpoint holds besides the weights, as it is at the end of a step: one that is made within the
        next step repeats that step, and with it the tokens, evaluations and choices."""
        self._completed = {
            "evaluations": dict(self.evaluations),
            "tokens": self.ledger.as_dict(),
            "curriculum": self.curriculum.state() if self.curriculum else None,
            "dataset": self.dataset,
        }

    def save(self, next_step: int) -> None:
        """Make a checkpoint from which the run goes on at `next_step`."""
        name = re.sub(r"[^\w.-]", "_", Path(self.config.run_dir).name)  # the stages of a pipeline share one service
        saves = {
            role: client.save_state(f"{name}-step-{next_step:06d}-{role}") for role, client in self.clients.items()
        }
        states = {role: save.result().path for role, save in saves.items()}
        checkpoint = Checkpoint(next_step, states, {**self._completed, "wall_s": self.wall_s})
        CheckpointLog(Path(self.config.run_dir)).append(checkpoint, self.config.checkpoint.keep)
        self.saved_step = next_step

    def save_after(self, error: BaseException) -> None:
        """Save the last completed step when something else than the backend ends the run after it.

        Nothing is saved when the weights are already ahead of that step: the newest checkpoint stays.
        """
        is_other = isinstance(error, Exception | KeyboardInterrupt | SystemExit)
        if not is_other or isinstance(error, BackendError | CheckpointError | OSError):
            return
        if self.weights_ahead or self.next_step in (0, self.saved_step):
            return
        self.tracker.say(f"saving a checkpoint of step {self.next_step}")
        try:
            self.save(self.next_step)
        except (CookbookError, OSError) as failure:
            self.tracker.say(f"warning: it could not be saved ({failure})")

    def step_done(self, next_step: int) -> None:
        """Count the step; save where `checkpoint.every` or the end says so; stop where the budget does.

        Raises:
            BudgetExceeded: the run has used more tokens or money than `budget` allows; a checkpoint is saved.
            Interrupted: a signal came during the step.
            OutputClosed: the reader of stdout is gone.
        """
        self.next_step = next_step
        self._remember()
        every = self.config.checkpoint.every
        try:
            self.config.budget.check(self.ledger, self.config.prices)
        except BudgetExceeded:
            self.save(next_step)
            raise
        if next_step == self.total_steps or (every and next_step % every == 0):
            self.save(next_step)
        self.weights_ahead = False
        interrupts.unshield()
        if self.tracker.output_closed:
            raise OutputClosed

    def summary(self, status: str) -> dict[str, object]:
        config = self.config
        return {
            "status": status,
            "recipe": config.recipe,
            "seed": config.seed,
            "backend": config.choices.get("backend", config.backend["_target_"]),
            "model": config.model.base_model,
            "dataset": config.choices.get("dataset", config.dataset["_target_"] if config.dataset else None),
            "trained": self.policy.trainable.as_dict() if self.policy.trainable else None,
            "rows": self.rows,
            "steps": self.next_step,
            "eval": self.evaluations,
            "objective": self.objective,
            "tokens": self.ledger.as_dict(),
            "cost_usd": cost_usd(self.ledger, config.prices),
            "wall_s": self.wall_s,
        }


@contextmanager
def open_run(
    config: RunConfig,
    components: CommonComponents,
    dataset: object,
    total_steps: int,
    headline: Sequence[str] = ("reward/mean",),
) -> Iterator[Run]:
    """Begin a run, or go on from its newest checkpoint; at the end write the summary, also when the loop raises.

    Args:
        dataset: what the run trains on.
        total_steps: how many steps it takes, or at most takes; `Run.set_total_steps` sets it later.
        headline: the metrics of a step that its line on the console shows.
    """
    folder, data = Path(config.run_dir), fingerprint(dataset)
    checkpoint, warnings = CheckpointLog(folder).latest_intact()
    next_step = checkpoint.next_step if checkpoint else 0
    check_steps(total_steps, next_step, config.run_dir)
    if checkpoint:
        warnings += compare(checkpoint.loop_state.get("dataset", {}), data)
    else:
        (folder / REFERENCE_FILE).unlink(missing_ok=True)
    with (
        Tracker(folder, asdict(config), [components.logger], total_steps, headline, next_step) as tracker,
        _create_policy(config, components.service, checkpoint) as policy,
    ):
        renderer = Renderer(policy.get_tokenizer(), config.model.renderer, config.model.name)
        run = Run(config, components.service, {"policy": policy}, renderer, tracker, total_steps, checkpoint, next_step)
        run.dataset, run.saved_step = data, next_step if checkpoint else None
        run.begin()
        try:
            for line in warnings:
                tracker.say(line)
            if checkpoint:
                tracker.say(f"continuing at step {next_step + 1}")
            if policy.trainable:
                tracker.say(f"training {policy.trainable}")
            yield run
        except BaseException as error:
            interrupts.clear()
            try:
                run.save_after(error)
            finally:  # a second signal does not wait for the save
                with interrupts.shielded():
                    tracker.fail(error, run.summary("failed"))
            raise
        with interrupts.shielded():
            tracker.finish(run.summary("completed"))


def check_steps(total_steps: int, next_step: int, run_dir: str) -> None:
    """Raises CheckpointError where a run has already taken more steps than it is to take."""
    if next_step > total_steps:
        raise CheckpointError(
            f"loop.steps={total_steps}: the run in {run_dir} has already taken {next_step} steps; ask for at least as "
            "many, or choose another run_dir"
        )


def _create_policy(config: RunConfig, service: ServiceClient, checkpoint: Checkpoint | None) -> TrainingClient:
    if checkpoint:
        return service.create_training_client_from_state(checkpoint.states["policy"], with_optimizer=True)
    client = service.create_lora_training_client(
        config.model.base_model, rank=config.lora.rank, alpha=config.lora.alpha, seed=config.seed
    )
    if config.start_from:
        try:
            client.load_state(config.start_from).result()
        except CheckpointError as error:
            raise CheckpointError(f"start_from={config.start_from}: {error}") from error
    return client


def reference_sampler(config: RunConfig, service: ServiceClient) -> SamplingClient:
    """A sampler of the policy as it was before the first step: the base model, or what the run started from."""
    if not config.start_from:
        return service.create_sampling_client(base_model=config.model.base_model)
    with service.create_training_client_from_state(config.start_from) as start:
        return start.save_weights_and_get_sampling_client()
