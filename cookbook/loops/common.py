"""What every loop does around its own steps: begin or resume, evaluate, save, and leave a summary behind."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from cookbook.core.clients import APIFuture, CustomLoss, SamplingClient, ServiceClient, TrainingClient
from cookbook.core.examples import Example
from cookbook.core.rollouts import Metrics
from cookbook.core.seeds import derive_seed
from cookbook.core.types import Datum, ForwardBackwardOutput, SamplingParams
from cookbook.data.curriculum import Curriculum
from cookbook.data.rendering import Renderer
from cookbook.envs.base import EnvFactory
from cookbook.loops.config import RunConfig
from cookbook.rl.evaluation import evaluate_reward
from cookbook.rl.rollouts import Rollouts
from cookbook.tracking import Logger, Tracker
from cookbook.tracking.checkpoints import Checkpoint, CheckpointLog
from cookbook.tracking.cost import BudgetExceeded, TokenLedger, cost_usd

T = TypeVar("T")


@dataclass(frozen=True)
class CommonParts:
    """What every loop is built from. A loop's own `Parts` adds the components it needs, named as in the configuration."""

    service: ServiceClient
    logger: Logger


@dataclass
class Session:
    """One run in progress: what is trained, and all that is recorded about it."""

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
    curriculum_state: dict[str, Any] | None = None
    """As it was at the last step's end: a checkpoint made within a step repeats that step."""

    @property
    def policy(self) -> TrainingClient:
        return self.clients["policy"]

    def critic(self) -> TrainingClient:
        """A second training client with a value head, from the checkpoint where there is one; saved along with the policy."""
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
        """Seconds of work, those of earlier processes of the same run included."""
        return self.seconds_before + time.monotonic() - self.started

    def record_rollouts(self, step: int, rollouts: Rollouts) -> None:
        self.ledger.add(prefill=rollouts.num_prefill_tokens, sampled=rollouts.num_sampled_tokens)
        self.tracker.log_rollouts(step, rollouts.groups)

    def record_evaluation(self, step: int, metrics: Metrics) -> None:
        """`step` is the number of training steps taken so far; the summary keeps the evaluations before the first and after the last."""
        when: Literal["before", "step", "after"] = "after" if step == self.total_steps else "step" if step else "before"
        if when != "step":
            self.evaluations[when] = metrics
        self.tracker.log_evaluation(when, step, metrics)

    def save(self, next_step: int) -> None:
        """Make a checkpoint from which the run goes on at `next_step`."""
        run = re.sub(r"[^\w.-]", "_", Path(self.config.run_dir).name)  # the stages of a pipeline share one service
        saves = {role: client.save_state(f"{run}-step-{next_step:06d}-{role}") for role, client in self.clients.items()}
        states = {role: save.result().path for role, save in saves.items()}
        loop_state = {"evaluations": self.evaluations, "tokens": self.ledger.as_dict(), "wall_s": self.wall_s}
        loop_state["curriculum"] = self.curriculum_state
        CheckpointLog(Path(self.config.run_dir)).append(
            Checkpoint(next_step, states, loop_state), self.config.checkpoint.keep
        )

    def step_done(self, next_step: int) -> None:
        """Count the step; save where `checkpoint.every` or the end says so; stop where the budget does.

        Raises:
            BudgetExceeded: the run has used more tokens or money than `budget` allows; a checkpoint is left.
        """
        self.next_step = next_step
        if self.curriculum:
            self.curriculum_state = self.curriculum.state()
        every = self.config.checkpoint.every
        try:
            self.config.budget.check(self.ledger, self.config.prices)
        except BudgetExceeded:
            self.save(next_step)
            raise
        if next_step == self.total_steps or (every and next_step % every == 0):
            self.save(next_step)

    def summary(self, status: str) -> dict[str, object]:
        config = self.config
        return {
            "status": status,
            "recipe": config.recipe,
            "scale": config.scale,
            "seed": config.seed,
            "backend": config.choices.get("backend", config.backend["_target_"]),
            "model": config.model.base_model,
            "dataset": config.choices.get("dataset", config.dataset["_target_"] if config.dataset else None),
            "steps": self.next_step,
            "eval": self.evaluations,
            "tokens": self.ledger.as_dict(),
            "cost_usd": cost_usd(self.ledger, config.prices),
            "wall_s": self.wall_s,
        }


@contextmanager
def open_session(
    config: RunConfig,
    parts: CommonParts,
    total_steps: int,
    headline: Sequence[str] = ("reward/mean",),
    curriculum: Curriculum | None = None,
) -> Iterator[Session]:
    """Begin a run, or go on from its newest checkpoint; in the end write the summary, also when the loop raises.

    A `curriculum` is brought to where the checkpoint left it, and saved with every further one.
    """
    checkpoint = CheckpointLog(Path(config.run_dir)).latest()
    next_step = checkpoint.next_step if checkpoint else 0
    with (
        Tracker(Path(config.run_dir), asdict(config), [parts.logger], total_steps, headline, next_step) as tracker,
        _policy(config, parts.service, checkpoint) as policy,
    ):
        renderer = Renderer(policy.get_tokenizer(), config.model.renderer, config.model.name)
        session = Session(
            config, parts.service, {"policy": policy}, renderer, tracker, total_steps, checkpoint, next_step
        )
        if checkpoint:
            session.ledger = TokenLedger.from_dict(checkpoint.loop_state["tokens"])
            session.evaluations = checkpoint.loop_state["evaluations"]
            session.seconds_before = checkpoint.loop_state["wall_s"]
        if curriculum:
            if checkpoint:
                curriculum.restore(checkpoint.loop_state["curriculum"])
            session.curriculum, session.curriculum_state = curriculum, curriculum.state()
        try:
            yield session
        except BaseException as error:
            tracker.fail(error, session.summary("failed"))
            raise
        tracker.finish(session.summary("completed"))


def _policy(config: RunConfig, service: ServiceClient, checkpoint: Checkpoint | None) -> TrainingClient:
    if checkpoint:
        return service.create_training_client_from_state(checkpoint.states["policy"], with_optimizer=True)
    if config.start_from:
        return service.create_training_client_from_state(config.start_from)
    return service.create_lora_training_client(
        config.model.base_model, rank=config.lora.rank, alpha=config.lora.alpha, seed=config.seed
    )


def reference_sampler(config: RunConfig, service: ServiceClient) -> SamplingClient:
    """A sampler of the policy as it was before the first step: the base model, or what the run started from."""
    if not config.start_from:
        return service.create_sampling_client(base_model=config.model.base_model)
    with service.create_training_client_from_state(config.start_from) as start:
        return start.save_weights_and_get_sampling_client()


def evaluation_due(config: RunConfig, step: int) -> bool:
    """Before the first step, and every `eval.every` steps."""
    return step == 0 or (config.eval.every > 0 and step % config.eval.every == 0)


def evaluate_policy(
    session: Session,
    examples: Sequence[Example],
    step: int,
    sampler: SamplingClient,
    make_env: EnvFactory,
    max_tokens: int,
) -> None:
    """Score one completion of each of the first `eval.examples` examples; `max_tokens` where `eval.max_tokens` is null."""
    config = session.config
    examples = held_out(examples, config.eval.examples)
    if not examples:
        return
    params = SamplingParams(max_tokens=config.eval.max_tokens or max_tokens, temperature=config.eval.temperature)
    evaluation = evaluate_reward(sampler, examples, make_env, params, config.seed)
    session.ledger.add(prefill=evaluation.rollouts.num_prefill_tokens, sampled=evaluation.rollouts.num_sampled_tokens)
    session.record_evaluation(step, evaluation.metrics)


def held_out(examples: Sequence[T], limit: int) -> list[T]:
    """The first `limit` examples; all of them where there are fewer."""
    return [examples[index] for index in range(min(limit, len(examples)))]


def forward_backward_custom(
    client: TrainingClient, service: ServiceClient, data: Sequence[Datum], loss_fn: CustomLoss
) -> APIFuture[ForwardBackwardOutput]:
    """A custom loss in one operation where the backend has it, else in two passes over its cross_entropy."""
    if service.capabilities.custom_loss:
        return client.forward_backward_custom(data, loss_fn)
    from cookbook.losses.two_pass import forward_backward_two_pass  # here, because it needs torch

    return forward_backward_two_pass(client, data, loss_fn)


class Stopwatch:
    """Seconds since it was made or last read, for `time/*` metrics."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        return elapsed
