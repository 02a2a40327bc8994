"""What every loop does around its own steps: begin or resume, evaluate, save, and leave a summary behind."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from cookbook.backends.base import SamplingClient, TrainingClient
from cookbook.backends.types import SamplingParams
from cookbook.build import Parts
from cookbook.checkpoint import Checkpoint, CheckpointLog
from cookbook.config import RunConfig
from cookbook.cost import BudgetExceeded, TokenLedger, cost_usd
from cookbook.evaluate import evaluate_reward
from cookbook.rendering import Renderer
from cookbook.rl.env import EnvFactory
from cookbook.rl.rollouts import Rollouts
from cookbook.tracking import Tracker
from cookbook.types import Example, Metrics


@dataclass
class Session:
    """One run in progress: the trained policy and all that is recorded about it."""

    config: RunConfig
    parts: Parts
    policy: TrainingClient
    renderer: Renderer
    tracker: Tracker
    total_steps: int
    next_step: int = 0
    ledger: TokenLedger = field(default_factory=TokenLedger)
    evaluations: dict[str, Metrics] = field(default_factory=dict)
    seconds_before: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def wall_s(self) -> float:
        """Seconds of work, those of earlier processes of the same run included."""
        return self.seconds_before + time.monotonic() - self.started

    def record_rollouts(self, step: int, rollouts: Rollouts) -> None:
        self.ledger.add(prefill=rollouts.num_prefill_tokens, sampled=rollouts.num_sampled_tokens)
        self.tracker.log_rollouts(step, rollouts.groups)

    def record_evaluation(self, when: Literal["before", "step", "after"], step: int, metrics: Metrics) -> None:
        """`step` is the number of training steps taken so far; the summary keeps "before" and "after"."""
        if when != "step":
            self.evaluations[when] = metrics
        self.tracker.log_evaluation(when, step, metrics)

    def save(self, next_step: int) -> None:
        """Make a checkpoint from which the run goes on at `next_step`."""
        saved = self.policy.save_state(f"step-{next_step:06d}").result()
        state = {"evaluations": self.evaluations, "tokens": self.ledger.as_dict(), "wall_s": self.wall_s}
        CheckpointLog(Path(self.config.run_dir)).append(Checkpoint(next_step, saved.path, state), self.config.checkpoint.keep)

    def step_done(self, next_step: int) -> None:
        """Count the step; save where `checkpoint.every` or the end says so; stop where the budget does.

        Raises:
            BudgetExceeded: the run has used more tokens or money than `budget` allows; a checkpoint is left.
        """
        self.next_step = next_step
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
            "backend": config.backend["_target_"],
            "model": config.model.base_model,
            "dataset": config.dataset["_target_"],
            "steps": self.next_step,
            "eval": self.evaluations,
            "tokens": self.ledger.as_dict(),
            "cost_usd": cost_usd(self.ledger, config.prices),
            "wall_s": self.wall_s,
        }


@contextmanager
def open_session(config: RunConfig, parts: Parts, total_steps: int) -> Iterator[Session]:
    """Begin a run, or go on from its newest checkpoint; in the end write the summary, also when the loop raises."""
    checkpoint = CheckpointLog(Path(config.run_dir)).latest()
    next_step = checkpoint.next_step if checkpoint else 0
    tracker = Tracker(Path(config.run_dir), asdict(config), [parts.logger], total_steps, next_step=next_step)
    if checkpoint:
        policy = parts.service.create_training_client_from_state(checkpoint.state_path, with_optimizer=True)
    else:
        policy = parts.service.create_lora_training_client(
            config.model.base_model, rank=config.lora.rank, alpha=config.lora.alpha, seed=config.seed
        )
    with policy:
        renderer = Renderer(policy.get_tokenizer(), config.model.renderer, config.model.name)
        session = Session(config, parts, policy, renderer, tracker, total_steps, next_step)
        if checkpoint:
            session.ledger = TokenLedger.from_dict(checkpoint.loop_state["tokens"])
            session.evaluations = checkpoint.loop_state["evaluations"]
            session.seconds_before = checkpoint.loop_state["wall_s"]
        try:
            yield session
        except BaseException as error:
            tracker.fail(error, session.summary("failed"))
            raise
        tracker.finish(session.summary("completed"))


def evaluate_policy(
    session: Session, when: Literal["before", "step", "after"], step: int, sampler: SamplingClient, make_env: EnvFactory, max_tokens: int
) -> None:
    """Score one completion of each of the first `eval.examples` held-out examples; `max_tokens` where `eval.max_tokens` is null."""
    config = session.config
    examples = held_out(session.parts.dataset.test, config.eval.examples)
    if not examples:
        return
    params = SamplingParams(max_tokens=config.eval.max_tokens or max_tokens, temperature=config.eval.temperature)
    evaluation = evaluate_reward(sampler, examples, make_env, params, config.seed)
    session.ledger.add(prefill=evaluation.rollouts.num_prefill_tokens, sampled=evaluation.rollouts.num_sampled_tokens)
    session.record_evaluation(when, step, evaluation.metrics)


def held_out(examples: Sequence[Example], limit: int) -> list[Example]:
    """The first `limit` examples; all of them where there are fewer."""
    return [examples[index] for index in range(min(limit, len(examples)))]


class Stopwatch:
    """Seconds since it was made or last read, for `time/*` metrics."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        return elapsed
