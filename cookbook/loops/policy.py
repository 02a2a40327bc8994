"""The loop of policy training: sample, reward, credit, update. GRPO and PPO are algorithms given to it.

`run` reads top to bottom. What is an algorithm's own (from rewards to advantages, datums, the update) is in
`cookbook.loops.algorithms`, one file each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar, get_args

from omegaconf import MISSING

from cookbook.core.clients import Capabilities, CustomLoss, SamplingClient
from cookbook.core.errors import CapabilityError, RewardError
from cookbook.core.kinds import Kinds
from cookbook.core.rollouts import Metrics, Reward, TrajectoryGroup
from cookbook.core.scoring import TimeLimited
from cookbook.core.types import Datum, SamplingParams
from cookbook.data.curriculum import CurriculumMaker
from cookbook.data.kinds import PromptDataset
from cookbook.envs.base import EnvFactory, EnvMaker
from cookbook.loops.common import CommonComponents, Stopwatch
from cookbook.loops.config import LoopConfig, RunConfig, require, require_at_least, require_choice
from cookbook.loops.prompts import Prompts
from cookbook.loops.run import Run, open_run
from cookbook.loops.updates import apply_truncated_importance, mismatch_without_training, recompute_old_logprobs
from cookbook.losses.spec import BuiltinLoss
from cookbook.rl.advantages import has_signal
from cookbook.rl.batch import grading_failures, rollout_metrics
from cookbook.rl.evaluation import evaluate_reward
from cookbook.rl.importance import ImportanceLevel
from cookbook.rl.rollouts import Rollouts, collect, merge_rounds

LOSS_AGGREGATIONS = ("token_mean", "sequence_mean", "constant")

BUILTIN_LOSS = f"{BuiltinLoss.__module__}.{BuiltinLoss.__qualname__}"


@dataclass
class PolicyConfig(LoopConfig):
    """The settings that all algorithms share."""

    steps: int = MISSING
    groups_per_batch: int = MISSING
    group_size: int = MISSING
    max_tokens: int = MISSING
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    loss_agg: str = "token_mean"
    kl_penalty_coef: float = 0.0
    importance_cap: float = 0.0
    importance_level: str = "token"
    dynamic_sampling_rounds: int = 0
    max_reward_error_rate: float = 0.2
    reward_retries: int = 2
    reward_timeout_s: float = 0.0

    def check(self, config: RunConfig, capabilities: Capabilities) -> None:
        require_at_least(1, "loop", self, "steps", "groups_per_batch", "group_size", "max_tokens")
        require_at_least(0, "loop", self, "reward_retries", "dynamic_sampling_rounds", "kl_penalty_coef")
        require_at_least(0, "loop", self, "reward_timeout_s")
        require_choice("loop.loss_agg", self.loss_agg, LOSS_AGGREGATIONS)
        require_choice("loop.importance_level", self.importance_level, get_args(ImportanceLevel))
        require(
            self.temperature > 0,
            f"loop.temperature={self.temperature}: must be above 0; greedy rollouts of a group are all the same",
        )
        require(0 < self.top_p <= 1, f"loop.top_p={self.top_p}: must be in (0, 1]")
        require(self.top_k == -1 or self.top_k >= 1, f"loop.top_k={self.top_k}: must be -1 (off) or at least 1")
        rate, cap = self.max_reward_error_rate, self.importance_cap
        require(0 <= rate <= 1, f"loop.max_reward_error_rate={rate}: must be in [0, 1]")
        require(cap == 0 or cap >= 1, f"loop.importance_cap={cap}: must be 0 (off) or at least 1")
        require(
            self.dynamic_sampling_rounds == 0 or self.group_size > 1,
            f"loop.dynamic_sampling_rounds={self.dynamic_sampling_rounds} with loop.group_size={self.group_size}: "
            "a group of one never has a signal, so every replacement would be in vain; set loop.group_size=2 or more, "
            "or loop.dynamic_sampling_rounds=0",
        )
        require(
            self.kl_penalty_coef == 0 or self.temperature == 1,
            f"loop.kl_penalty_coef={self.kl_penalty_coef} with loop.temperature={self.temperature}: the reference's "
            "logprobs are those of temperature 1, so the penalty would compare two different distributions; "
            "set loop.temperature=1 or loop.kl_penalty_coef=0",
        )
        loss, custom = config.loss or {}, uses_custom_loss(config)
        if cap and self.temperature != 1 and (custom or not capabilities.loss_temperature):
            what = "a custom loss" if custom else "this backend's forward"
            raise CapabilityError(
                f"loop.importance_cap={cap} with loop.temperature={self.temperature}: {what} knows no temperature, so "
                "its logprobs are not comparable with the sampler's; set loop.importance_cap=0 or loop.temperature=1"
            )
        if not custom and "name" in loss and loss["name"] not in capabilities.losses:
            available = ", ".join(sorted(capabilities.losses))
            raise CapabilityError(f"loss={loss['name']}: this backend has {available}; choose one of those")

    @property
    def sampling_params(self) -> SamplingParams:
        return SamplingParams(self.max_tokens, self.temperature, self.top_p, self.top_k)


def uses_custom_loss(config: RunConfig) -> bool:
    """Whether the run's loss is a function of the user's own instead of one that backends have built in."""
    return config.loss is not None and config.loss.get("_target_") != BUILTIN_LOSS


@dataclass(frozen=True)
class Components(CommonComponents):
    """What policy training is built from. An algorithm narrows down which advantages it takes."""

    dataset: Annotated[PromptDataset, Kinds("prompts")]
    env: EnvMaker
    reward: Reward
    loss: Annotated[BuiltinLoss | CustomLoss, Kinds("builtin", "custom")]
    advantage: Any
    curriculum: CurriculumMaker


Credit = TypeVar("Credit")


class Algorithm(Protocol[Credit]):
    """What is an algorithm's own. `Credit` is whatever it carries from `credit` to `datums`."""

    def credit(self, groups: Sequence[TrajectoryGroup]) -> tuple[Credit, Metrics]:
        """From the rewards of a step's groups to the advantages of their tokens."""
        ...

    def datums(self, credit: Credit) -> list[Datum]:
        """What to train on: none where the step has nothing to teach."""
        ...

    def update(self, data: list[Datum], step: int) -> Metrics:
        """Train on the datums: gradients and optimizer steps."""
        ...


AlgorithmMaker = Callable[[Run, Components], Algorithm[Any]]


def run(config: RunConfig, components: Components, make_algorithm: AlgorithmMaker) -> float | None:
    """Train `config.model` by reinforcement learning. Leaves everything in `config.run_dir`.

    Returns:
        Held-out accuracy after training, None where nothing was evaluated.

    Raises:
        RewardError: more than `loop.max_reward_error_rate` of a step's completions could not be graded; a checkpoint
            is saved.
        BudgetExceeded: the run reached `budget`; a checkpoint is saved.
    """
    loop: PolicyConfig = config.loop

    with open_run(config, components, components.dataset, loop.steps) as run:
        algorithm = make_algorithm(run, components)
        reward = TimeLimited(components.reward, loop.reward_timeout_s) if loop.reward_timeout_s else components.reward
        make_env = partial(components.env, renderer=run.renderer, reward=reward, reward_retries=loop.reward_retries)
        prompts = Prompts(run, components.dataset, make_env, reward)
        curriculum = components.curriculum(prompts.train, config.seed)
        run.use_curriculum(curriculum)
        sampler = run.policy.save_weights_and_get_sampling_client()

        for step in range(run.next_step, loop.steps):
            total, lap = Stopwatch(), Stopwatch()
            metrics: Metrics = {"optim/lr": config.optim.learning_rate}

            # 1. Evaluate: held-out accuracy, before the first step and every `eval.every` steps.
            if run.evaluation_due(step):
                _evaluate(run, prompts, step, sampler, make_env)
                metrics["time/eval"] = lap.lap()

            # 2. Choose problems, sample a group of completions for each, and grade every completion as it arrives.
            groups, rollouts = _sample_groups(run, prompts, sampler, make_env, step)
            metrics |= rollout_metrics(rollouts.trajectories) | curriculum.metrics()
            metrics |= {"time/sample": rollouts.sample_s, "time/reward_wait": rollouts.reward_wait_s}
            metrics |= {"tokens/prefill": rollouts.num_prefill_tokens, "tokens/sampled": rollouts.num_sampled_tokens}
            if loop.dynamic_sampling_rounds:
                metrics["groups/resampled"] = float(len(rollouts.groups) - len(groups))
            lap.lap()

            # 3. Credit: from rewards to the advantage of every sampled token.
            credit, credit_metrics = algorithm.credit(groups)
            data = algorithm.datums(credit)
            metrics |= credit_metrics | {"time/advantages": lap.lap()}

            # 4. Update.
            if data:
                data = recompute_old_logprobs(run, data, components.loss)
                data, importance_metrics = apply_truncated_importance(run, data)
                metrics |= algorithm.update(data, step) | importance_metrics
            else:
                metrics |= mismatch_without_training(run, rollouts.trajectories)
            metrics["time/train"] = lap.lap()

            # 5. Rebind: the next step samples from the new weights.
            sampler = run.policy.save_weights_and_get_sampling_client()

            # 6. Record and save.
            metrics["time/step"] = total.lap()
            run.tracker.log(step, metrics)
            _warn(run, metrics, rollouts, taught=bool(data))
            run.step_done(step + 1)

        # 7. Evaluate after training, on the same held-out problems as before.
        _evaluate(run, prompts, loop.steps, sampler, make_env)
        return run.objective


def _sample_groups(
    run: Run, prompts: Prompts, sampler: SamplingClient, make_env: EnvFactory, step: int
) -> tuple[list[TrajectoryGroup], Rollouts]:
    """The groups to train on, and all that was sampled to get them.

    Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2), with a bound: a group without signal is
    replaced by one of a further problem, in up to `loop.dynamic_sampling_rounds` rounds. The groups of the last round
    stay in any case, so the batch is always full.
    """
    loop: PolicyConfig = run.config.loop
    curriculum = run.curriculum
    assert curriculum is not None
    groups: list[TrajectoryGroup] = []
    rounds: list[Rollouts] = []
    for number in range(loop.dynamic_sampling_rounds + 1):
        groups = [group for group in groups if has_signal(group.graded_rewards)]
        if len(groups) == loop.groups_per_batch:
            break
        indices = prompts.draw(curriculum, loop.groups_per_batch - len(groups))
        examples = [prompts.train[index] for index in indices]
        seed_path = (run.config.seed, "rollout", step, *(("refill", number) if number else ()))
        rollouts = collect(
            sampler, examples, make_env, loop.group_size, loop.sampling_params, seed_path, run.tracker.say
        )
        run.record_rollouts(step, rollouts)
        rounds.append(rollouts)
        _stop_if_grading_fails(run, step, merge_rounds(rounds))
        curriculum.record(indices, [group.graded_rewards for group in rollouts.groups])
        groups += rollouts.groups
    return groups, merge_rounds(rounds)


def _evaluate(run: Run, prompts: Prompts, step: int, sampler: SamplingClient, make_env: EnvFactory) -> None:
    """Grade one completion of each of the first `eval.examples` held-out problems.

    Some grading failures make an evaluation less precise, which is recorded. If nothing could be graded, the run stops.
    """
    settings, loop = run.config.eval, run.config.loop
    if not prompts.test:
        return
    params = SamplingParams(max_tokens=settings.max_tokens or loop.max_tokens, temperature=settings.temperature)
    evaluation = evaluate_reward(sampler, prompts.test, make_env, params, run.config.seed, run.tracker.say)
    rollouts = evaluation.rollouts
    run.ledger.add(prefill=rollouts.num_prefill_tokens, sampled=rollouts.num_sampled_tokens)
    run.record_evaluation(step, evaluation.metrics)
    if evaluation.metrics["reward/error"] == 1:
        _stop_if_grading_fails(run, step, rollouts)
    _warn_of_grading_failures(run, rollouts)


def _stop_if_grading_fails(run: Run, step: int, rollouts: Rollouts) -> None:
    """Raises RewardError, after a checkpoint, if more than `loop.max_reward_error_rate` could not be graded."""
    limit = run.config.loop.max_reward_error_rate
    error_rate, reason = grading_failures(rollouts.trajectories)
    if error_rate > limit:
        run.save(step)
        raise RewardError(
            f"step {step}: {error_rate:.0%} of the completions could not be graded, more than "
            f"loop.max_reward_error_rate={limit}; the first: {reason}; fix it and continue from the checkpoint with "
            "resume=auto"
        )


def _warn_of_grading_failures(run: Run, rollouts: Rollouts) -> None:
    failed = sum(trajectory.status == "error" for trajectory in rollouts.trajectories)
    if failed:
        reason = grading_failures(rollouts.trajectories)[1]
        run.tracker.say(
            f"warning: {failed} of {len(rollouts.trajectories)} completions could not be graded; the first: {reason}"
        )


def _warn(run: Run, metrics: Metrics, rollouts: Rollouts, taught: bool) -> None:
    """Say so when completions could not be graded or were cut off, or when a step could not teach anything."""
    _warn_of_grading_failures(run, rollouts)
    if metrics.get("reward/std") == 0:
        run.tracker.say("warning: all rewards of this step are the same; is the task too easy or too hard?")
    elif not taught:
        run.tracker.say(
            "warning: no group had two different rewards, so this step taught nothing; raise loop.group_size"
        )
    if metrics["rollout/truncated"] > 0.9:
        run.tracker.say(
            f"warning: {metrics['rollout/truncated']:.0%} of the completions were cut off at "
            f"loop.max_tokens={run.config.loop.max_tokens}; raise it"
        )
