"""GRPO on grade-school word problems in one flat file: no Hydra, no helpers of the loops.

    python -m recipes.minimal_grpo --steps 10

It uses only the three clients. Replace `LocalService` by the service of another backend, and the loop runs there.
The full loop (`cookbook/loops/policy.py`) adds checkpoints and resume, KL penalties, substeps, multi-turn
environments, composed rewards, metrics files, cost, and a choice of loss, advantage and aggregation.
"""

import argparse
import time

import numpy as np

from cookbook.backends.local import LocalService
from cookbook.core.clients import SamplingClient
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion
from cookbook.core.seeds import derive_seed
from cookbook.core.types import AdamParams, Datum, ModelInput, SamplingParams
from cookbook.data.generated.word_problems import WordProblems
from cookbook.data.rendering import Renderer
from rewards.math import GSM8K

# ---- Settings -------------------------------------------------------------------------------------------------------

parser = argparse.ArgumentParser(description="GRPO over the three clients, in one file.")
parser.add_argument("--model", default="tiny", help="a base model of the local backend, or a folder")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--problems", type=int, default=32, help="problems per step")
parser.add_argument("--samples", type=int, default=8, help="completions per problem")
parser.add_argument("--max-tokens", type=int, default=128)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--eval-examples", type=int, default=100)
parser.add_argument("--seed", type=int, default=0)


def grade(reward: GSM8K, text: str, stop_reason, num_tokens: int, example: Example) -> float:
    return reward(Completion(text, stop_reason, num_tokens), example).value


def accuracy(
    sampler: SamplingClient, examples: list[Example], renderer: Renderer, reward: GSM8K, max_tokens: int
) -> float:
    """Greedy pass@1."""
    params = SamplingParams(max_tokens, temperature=0.0, stop=renderer.stop_tokens)
    futures = [
        sampler.sample(ModelInput.from_ints(renderer.prompt(example.messages)), 1, params) for example in examples
    ]
    scores = []
    for example, future in zip(examples, futures, strict=True):
        (sequence,) = future.result().sequences
        scores.append(
            grade(reward, renderer.text(sequence.tokens), sequence.stop_reason, len(sequence.tokens), example)
        )
    return float(np.mean(scores))


def main(args: argparse.Namespace) -> dict[str, float]:
    service = LocalService()
    policy = service.create_lora_training_client(args.model, rank=32, alpha=64, seed=args.seed)
    renderer = Renderer(policy.get_tokenizer(), model_name=args.model)
    problems, reward = WordProblems(), GSM8K()
    held_out = [problems.test[index] for index in range(args.eval_examples)]
    adam = AdamParams(learning_rate=args.learning_rate, grad_clip_norm=1.0)

    sampler = policy.save_weights_and_get_sampling_client()
    before = accuracy(sampler, held_out, renderer, reward, args.max_tokens)
    print(f"held-out accuracy before: {before:.1%}")

    for step in range(args.steps):
        started = time.perf_counter()

        # 1. Sample. All requests are sent before the first result is awaited, so the backend batches them.
        examples = [problems.train[step * args.problems + index] for index in range(args.problems)]
        prompts = [renderer.prompt(example.messages) for example in examples]
        futures = [
            sampler.sample(
                ModelInput.from_ints(prompt),
                args.samples,
                SamplingParams(
                    args.max_tokens,
                    temperature=1.0,
                    stop=renderer.stop_tokens,
                    seed=derive_seed(args.seed, step, index),
                ),
            )
            for index, prompt in enumerate(prompts)
        ]

        # 2. Reward each completion and compare it with its own group.
        data, rewards = [], []
        for example, prompt, future in zip(examples, prompts, futures, strict=True):
            sequences = future.result().sequences
            group = np.array(
                [grade(reward, renderer.text(s.tokens), s.stop_reason, len(s.tokens), example) for s in sequences]
            )
            rewards.append(group.mean())
            if group.max() > group.min():  # a group with equal rewards has no gradient
                for sequence, advantage in zip(sequences, group - group.mean(), strict=True):
                    data.append(policy_datum(prompt, sequence.tokens, sequence.logprobs, advantage))

        # 3. One policy-gradient step. The loss is a sum over tokens; scaling the weights makes it the mean.
        if data:
            num_tokens = sum(datum.loss_fn_inputs["weights"].sum() for datum in data)
            data = [
                Datum(d.model_input, {**d.loss_fn_inputs, "weights": d.loss_fn_inputs["weights"] / num_tokens})
                for d in data
            ]
            gradient = policy.forward_backward(data, "importance_sampling")
            update = policy.optim_step(adam)
            gradient.result()
            update.result()

        # 4. On-policy: the next step samples from the new weights.
        sampler = policy.save_weights_and_get_sampling_client()
        seconds = time.perf_counter() - started
        print(f"step {step + 1:2d}/{args.steps}  reward {np.mean(rewards):.3f}  datums {len(data):3d}  {seconds:.1f} s")

    after = accuracy(sampler, held_out, renderer, reward, args.max_tokens)
    print(f"held-out accuracy after: {after:.1%}")
    service.stop()
    return {"before": before, "after": after}


def policy_datum(prompt: list[int], completion: list[int], logprobs: list[float], advantage: float) -> Datum:
    """Position i of the input predicts token i + 1, so the first target is the second token."""
    tokens = prompt + completion
    sampled = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(completion))
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {
            "target_tokens": np.array(tokens[1:]),
            "logprobs": np.array([0.0] * (len(prompt) - 1) + logprobs),
            "advantages": advantage * sampled,
            "weights": sampled,
        },
    )


if __name__ == "__main__":
    main(parser.parse_args())
