"""GRPO: group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300), on any backend.

Per step: sample a group of completions for each of several problems, compare each with its own group, and take a policy
gradient step towards those that did better. `run` reads top to bottom; everything that it calls is one file away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from cookbook.core.clients import APIFuture, SamplingClient, TrainingClient
from cookbook.core.datums import scale_weights, with_inputs
from cookbook.core.rollouts import Metrics, Reward, TrajectoryGroup
from cookbook.core.types import Datum, ForwardBackwardOutput, SamplingParams
from cookbook.data.curriculum import Curriculum, CurriculumMaker
from cookbook.data.kinds import PromptDataset
from cookbook.envs.base import EnvFactory, EnvMaker
from cookbook.loops.common import (
    CommonParts,
    Session,
    Stopwatch,
    evaluate_policy,
    evaluation_due,
    forward_backward_custom,
    open_session,
    reference_sampler,
)
from cookbook.loops.config import GRPOConfig, RunConfig
from cookbook.loops.policy_steps import (
    correct_sampler,
    graded_rewards,
    like_for_like,
    loss_config,
    merged,
    mismatch_without_training,
    shares,
    stop_if_grading_fails,
    update_metrics,
    warn_if_stuck,
)
from cookbook.losses.spec import BuiltinLoss
from cookbook.rl.advantages import GroupAdvantage, has_signal
from cookbook.rl.batch import (
    group_datums,
    kl_per_trajectory,
    mismatch_metrics,
    reference_logprobs,
    rollout_metrics,
)
from cookbook.rl.rollouts import Rollouts, collect


@dataclass(frozen=True)
class Parts(CommonParts):
    """What this loop is built from."""

    dataset: PromptDataset
    env: EnvMaker
    reward: Reward
    loss: BuiltinLoss
    advantage: GroupAdvantage
    curriculum: CurriculumMaker


def run(config: RunConfig, parts: Parts) -> None:
    """Train `config.model` with GRPO. Leaves everything in `config.run_dir`.

    Raises:
        RewardError: more than `loop.max_reward_error_rate` of a step's completions could not be graded; a checkpoint is left.
        BudgetExceeded: the run reached `budget`; a checkpoint is left.
    """
    loop: GRPOConfig = config.loop
    curriculum = parts.curriculum(parts.dataset.train, config.seed)

    with open_session(config, parts, loop.steps, curriculum=curriculum) as session:
        policy, tracker = session.policy, session.tracker
        if parts.dataset.bad_rows.total:
            tracker.say(f"dataset: {parts.dataset.bad_rows}")
        make_env = partial(
            parts.env, renderer=session.renderer, reward=parts.reward, reward_retries=loop.reward_retries
        )
        reference = reference_sampler(config, parts.service) if loop.kl_penalty_coef else None
        sampler = policy.save_weights_and_get_sampling_client()

        for step in range(session.next_step, loop.steps):
            total, lap = Stopwatch(), Stopwatch()
            metrics: Metrics = {"optim/lr": config.optim.learning_rate}

            # 0. Held-out accuracy, before the first step and every `eval.every` steps.
            if evaluation_due(config, step):
                evaluate_policy(session, parts.dataset.test, step, sampler, make_env, loop.max_tokens)
                metrics["time/eval"] = lap.lap()

            # 1. The curriculum chooses problems; sample a group of completions for each, and score every completion as it arrives.
            # Up to `max_refills` times, groups without signal are replaced by groups of further problems.
            groups, rollouts = _sample_groups(session, parts, curriculum, sampler, make_env, step)
            metrics |= rollout_metrics(rollouts.trajectories) | curriculum.metrics()
            metrics |= {"time/sample": rollouts.sample_s, "time/reward_wait": rollouts.reward_wait_s}
            if loop.max_refills:
                metrics["groups/refilled"] = float(len(rollouts.groups) - len(groups))
            lap.lap()

            # 2. Advantages: each reward against its group. Groups that are all alike teach nothing and are left out.
            penalties = None
            if reference is not None and loop.kl_placement == "reward":
                kl = kl_per_trajectory(groups, reference)
                penalties = [[loop.kl_penalty_coef * value for value in group] for group in kl]
                metrics["kl/reference"] = float(np.mean([value for group in kl for value in group]))
            data, batch_metrics = group_datums(groups, parts.advantage, penalties)
            metrics |= batch_metrics

            # 3. Train.
            if data:
                if reference is not None and loop.kl_placement == "loss":
                    data = _with_reference_logprobs(data, reference)
                data = like_for_like(data, policy, parts.service, loop.temperature)
                data, importance_metrics = correct_sampler(data, session, parts.service)
                metrics |= _train(policy, data, config, parts, step) | importance_metrics
                session.ledger.add(trained=sum(datum.model_input.length for datum in data))
            else:
                metrics |= mismatch_without_training(session, rollouts.trajectories, parts.service)
            metrics["time/train"] = lap.lap()

            # 4. The next step samples from the new weights.
            sampler = policy.save_weights_and_get_sampling_client()

            # 5. Record and save.
            metrics |= {"tokens/prefill": rollouts.num_prefill_tokens, "tokens/sampled": rollouts.num_sampled_tokens}
            metrics["time/step"] = total.lap()
            tracker.log(step, metrics)
            warn_if_stuck(session, metrics)
            session.step_done(step + 1)

        # 6. After: the same held-out problems as before.
        evaluate_policy(session, parts.dataset.test, loop.steps, sampler, make_env, loop.max_tokens)


def _sample_groups(
    session: Session, parts: Parts, curriculum: Curriculum, sampler: SamplingClient, make_env: EnvFactory, step: int
) -> tuple[list[TrajectoryGroup], Rollouts]:
    """The groups to train on, and all that was sampled to get them.

    Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2), with a bound: a group without signal is replaced by one of
    a further problem, in up to `loop.max_refills` rounds. Those of the last round stay, whatever they are, so the batch is always full.
    """
    loop: GRPOConfig = session.config.loop
    sampling_params = SamplingParams(loop.max_tokens, loop.temperature, loop.top_p, loop.top_k)
    groups: list[TrajectoryGroup] = []
    rounds: list[Rollouts] = []
    for refill in range(loop.max_refills + 1):
        groups = [
            group for group, rewards_G in zip(groups, graded_rewards(groups), strict=True) if has_signal(rewards_G)
        ]
        if len(groups) == loop.groups_per_batch:
            break
        indices = curriculum.choose(loop.groups_per_batch - len(groups))
        seed_path = (session.config.seed, "rollout", step, *(("refill", refill) if refill else ()))
        examples = [parts.dataset.train[index] for index in indices]
        rollouts = collect(sampler, examples, make_env, loop.group_size, sampling_params, seed_path)
        session.record_rollouts(step, rollouts)
        rounds.append(rollouts)
        stop_if_grading_fails(session, step, rollout_metrics(merged(rounds).trajectories)["reward/error"])
        curriculum.record(indices, graded_rewards(rollouts.groups))
        groups += rollouts.groups
    return groups, merged(rounds)


def _train(policy: TrainingClient, data: Sequence[Datum], config: RunConfig, parts: Parts, step: int) -> Metrics:
    """Take `loop.num_substeps` optimizer steps, each on its own share of the batch; all are enqueued before any is awaited."""
    loop: GRPOConfig = config.loop
    minibatches = [
        scale_weights(share, loop.loss_agg, loop.max_tokens)
        for share in shares(data, loop.num_substeps, config.seed, "substeps", step)
    ]
    updates = [
        (_forward_backward(policy, minibatch, parts, loop), policy.optim_step(config.optim))
        for minibatch in minibatches
    ]
    metrics = update_metrics(updates) | mismatch_metrics(minibatches[0], updates[0][0].result())
    return metrics | {
        "tokens/trained": float(sum(datum.model_input.length for datum in data)),
        "optim/substeps": float(len(updates)),
    }


def _forward_backward(
    policy: TrainingClient, data: list[Datum], parts: Parts, loop: GRPOConfig
) -> APIFuture[ForwardBackwardOutput]:
    if loop.kl_penalty_coef > 0 and loop.kl_placement == "loss":
        from cookbook.losses.kl import with_kl_penalty  # here, because it needs torch

        return forward_backward_custom(
            policy, parts.service, data, with_kl_penalty(parts.loss, loop.kl_estimator, loop.kl_penalty_coef)
        )
    return policy.forward_backward(data, parts.loss.name, loss_config(parts.loss, parts.service, loop.temperature))


def _with_reference_logprobs(data: list[Datum], reference: SamplingClient) -> list[Datum]:
    references = reference_logprobs(data, reference)
    return [with_inputs(datum, ref_logprobs=logprobs) for datum, logprobs in zip(data, references, strict=True)]
