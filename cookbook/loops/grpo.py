"""GRPO: group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300), on any backend.

Per step: sample a group of completions for each of several problems, compare each with its own group, and take a policy
gradient step towards those that did better. `run` reads top to bottom; everything that it calls is one file away.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cookbook.backends.base import APIFuture, SamplingClient, TrainingClient
from cookbook.backends.types import Datum, ForwardBackwardOutput, OptimStepResponse, SamplingParams
from cookbook.config import GRPOConfig, RunConfig
from cookbook.data.base import order_index
from cookbook.datums import scale_weights
from cookbook.errors import RewardError
from cookbook.loops.common import Session, Stopwatch, evaluate_policy, open_session
from cookbook.rl.batch import group_datums, kl_per_trajectory, mismatch_metrics, reference_logprobs, rollout_metrics
from cookbook.rl.rollouts import collect
from cookbook.rl.seeds import derive_seed
from cookbook.types import Metrics

if TYPE_CHECKING:
    from cookbook.build import Parts


def run(config: RunConfig, parts: Parts) -> None:
    """Train `config.model` with GRPO. Leaves everything in `config.run_dir`.

    Raises:
        RewardError: more than `loop.max_reward_error_rate` of a step's completions could not be graded; a checkpoint is left.
        BudgetExceeded: the run reached `budget`; a checkpoint is left.
    """
    loop: GRPOConfig = config.loop
    train = parts.dataset.train
    sampling_params = SamplingParams(loop.max_tokens, loop.temperature, loop.top_p, loop.top_k)

    with open_session(config, parts, loop.steps) as session:
        policy, tracker = session.policy, session.tracker
        make_env = partial(parts.env, renderer=session.renderer, reward=parts.reward, reward_retries=loop.reward_retries)
        reference = parts.service.create_sampling_client(base_model=config.model.base_model) if loop.kl_penalty_coef else None
        sampler = policy.save_weights_and_get_sampling_client()

        for step in range(session.next_step, loop.steps):
            total, lap = Stopwatch(), Stopwatch()
            metrics: Metrics = {"optim/lr": config.optim.learning_rate}

            # 0. Held-out accuracy, before the first step and every `eval.every` steps.
            if step == 0 or (config.eval.every and step % config.eval.every == 0):
                evaluate_policy(session, "step" if step else "before", step, sampler, make_env, loop.max_tokens)
                metrics["time/eval"] = lap.lap()

            # 1. Draw the problems of this step: a seeded shuffle of every epoch, addressed by position.
            positions = range(step * loop.groups_per_batch, (step + 1) * loop.groups_per_batch)
            examples = [train[order_index(position, len(train), config.seed)] for position in positions]

            # 2. Sample a group of completions for each; every completion is scored as it arrives.
            rollouts = collect(sampler, examples, make_env, loop.group_size, sampling_params, (config.seed, "rollout", step))
            session.record_rollouts(step, rollouts)
            metrics |= rollout_metrics(rollouts.trajectories)
            metrics |= {"time/sample": rollouts.sample_s, "time/reward_wait": rollouts.reward_wait_s}
            _stop_if_grading_fails(session, step, metrics["reward/error"])
            lap.lap()

            # 3. Advantages: each reward against its group. Groups that are all alike teach nothing and are left out.
            penalties = None
            if reference is not None and loop.kl_placement == "reward":
                kl = kl_per_trajectory(rollouts.groups, reference)
                penalties = [[loop.kl_penalty_coef * value for value in group] for group in kl]
                metrics["kl/reference"] = float(np.mean([value for group in kl for value in group]))
            data, batch_metrics = group_datums(rollouts.groups, parts.advantage, penalties)
            metrics |= batch_metrics

            # 4. Train: each sub-step's forward_backward and optim_step are enqueued before either is awaited.
            if data:
                if reference is not None and loop.kl_placement == "loss":
                    data = _with_reference_logprobs(data, reference)
                data = _like_for_like(data, policy, parts, loop)
                metrics |= _train(policy, data, config, parts, step)
                session.ledger.add(trained=sum(datum.model_input.length for datum in data))
            metrics["time/train"] = lap.lap()

            # 5. The next step samples from the new weights.
            sampler = policy.save_weights_and_get_sampling_client()

            # 6. Record and save.
            metrics |= {"tokens/prefill": rollouts.num_prefill_tokens, "tokens/sampled": rollouts.num_sampled_tokens}
            metrics["time/step"] = total.lap()
            tracker.log(step, metrics)
            _warn_if_stuck(session, metrics)
            session.step_done(step + 1)

        # 7. After: the same held-out problems as before.
        evaluate_policy(session, "after", loop.steps, sampler, make_env, loop.max_tokens)


def _train(policy: TrainingClient, data: Sequence[Datum], config: RunConfig, parts: Parts, step: int) -> Metrics:
    """Take `loop.num_substeps` optimizer steps, each on its own share of the batch."""
    loop: GRPOConfig = config.loop
    order = np.random.default_rng(derive_seed(config.seed, "substeps", step)).permutation(len(data))
    shares = np.array_split(order, min(loop.num_substeps, len(data)))
    pending: list[tuple[list[Datum], APIFuture[ForwardBackwardOutput], APIFuture[OptimStepResponse]]] = []
    for share in shares:
        minibatch = scale_weights([data[index] for index in share], loop.loss_agg, loop.max_tokens)
        gradient = _forward_backward(policy, minibatch, parts, loop)
        pending.append((minibatch, gradient, policy.optim_step(config.optim)))

    outputs = [(minibatch, gradient.result(), update.result()) for minibatch, gradient, update in pending]
    first_minibatch, first_output, _ = outputs[0]
    metrics = mismatch_metrics(first_minibatch, first_output)
    for key in first_output.metrics:
        name, reduction = key.split(":")
        values = [output.metrics[key] for _, output, _ in outputs]
        metrics[f"train/{name}_{reduction}"] = float(np.sum(values) if reduction == "sum" else np.mean(values))
    for key in outputs[0][2].metrics:
        metrics[f"optim/{key}"] = float(np.mean([update.metrics[key] for _, _, update in outputs]))
    return metrics | {"tokens/trained": float(sum(datum.model_input.length for datum in data)), "optim/substeps": float(len(shares))}


def _forward_backward(policy: TrainingClient, data: list[Datum], parts: Parts, loop: GRPOConfig) -> APIFuture[ForwardBackwardOutput]:
    if loop.kl_penalty_coef > 0 and loop.kl_placement == "loss":
        from cookbook.losses.kl import with_kl_penalty

        return policy.forward_backward_custom(data, with_kl_penalty(parts.loss, loop.kl_estimator, loop.kl_penalty_coef))
    loss_config = dict(parts.loss.config)
    if parts.service.capabilities.loss_temperature:
        loss_config["temperature"] = loop.temperature
    return policy.forward_backward(data, parts.loss.name, loss_config)


def _like_for_like(data: list[Datum], policy: TrainingClient, parts: Parts, loop: GRPOConfig) -> list[Datum]:
    """Datums whose `logprobs` are of the same distribution as the trainer's, so that the first sub-step's ratios are 1.

    The sampler's are those after temperature. Where the backend's losses know no temperature, the old logprobs are taken
    from a forward pass of the same weights instead.
    """
    if loop.temperature == 1 or parts.service.capabilities.loss_temperature:
        return data
    outputs = policy.forward(data, "cross_entropy").result().loss_fn_outputs
    return [_replace_input(datum, "logprobs", output["logprobs"]) for datum, output in zip(data, outputs, strict=True)]


def _with_reference_logprobs(data: list[Datum], reference: SamplingClient) -> list[Datum]:
    references = reference_logprobs(data, reference)
    return [_replace_input(datum, "ref_logprobs", logprobs) for datum, logprobs in zip(data, references, strict=True)]


def _replace_input(datum: Datum, key: str, values: np.ndarray) -> Datum:
    return Datum(datum.model_input, {**datum.loss_fn_inputs, key: values})


def _stop_if_grading_fails(session: Session, step: int, error_rate: float) -> None:
    limit = session.config.loop.max_reward_error_rate
    if error_rate > limit:
        session.save(step)
        raise RewardError(
            f"step {step}: {error_rate:.0%} of the completions could not be graded, more than loop.max_reward_error_rate={limit}; "
            "the causes are in rollouts.jsonl; mend the grader and go on from the checkpoint with resume=auto"
        )


def _warn_if_stuck(session: Session, metrics: Metrics) -> None:
    """Say so when a step could not teach anything, or nearly every completion was cut off."""
    if metrics["groups/without_signal"] == metrics["groups/total"]:
        session.tracker.say("warning: no group had two different rewards, so nothing was learnt in this step; is the task too easy or too hard?")
    if metrics["rollout/truncated"] > 0.9:
        session.tracker.say(
            f"warning: {metrics['rollout/truncated']:.0%} of the completions were cut off at loop.max_tokens={session.config.loop.max_tokens}; raise it"
        )
