"""Supervised fine-tuning over the training client in one flat file.

    python -m recipes.minimal_sft --steps 30

Trains on worked answers of grade-school word problems and prints the held-out loss (nats per token) before and after.
"""

import argparse

import numpy as np

from cookbook.backends.local import LocalService
from cookbook.core.clients import TrainingClient
from cookbook.core.examples import Example
from cookbook.core.types import AdamParams, Datum, ModelInput
from cookbook.data.generated.word_problems import WordProblems
from cookbook.data.rendering import Renderer

parser = argparse.ArgumentParser(description="Supervised fine-tuning in one file.")
parser.add_argument("--model", default="tiny", help="a base model of the local backend, or a folder")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=32, help="examples per step")
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--eval-examples", type=int, default=64)
parser.add_argument("--seed", type=int, default=0)


def sft_datum(renderer: Renderer, example: Example) -> Datum:
    """Prompt and answer as one sequence; only the answer, its end-of-turn token included, has weight."""
    prompt = renderer.prompt(example.messages)
    answer = [*renderer.tokens(example.extra["solution"]), renderer.stop_tokens[0]]
    tokens = prompt + answer
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": np.array(tokens[1:]), "weights": np.array([0.0] * (len(prompt) - 1) + [1.0] * len(answer))},
    )


def token_mean(data: list[Datum]) -> list[Datum]:
    """The loss is a sum over tokens; scaling the weights makes it the mean."""
    total = sum(datum.loss_fn_inputs["weights"].sum() for datum in data)
    return [Datum(d.model_input, {**d.loss_fn_inputs, "weights": d.loss_fn_inputs["weights"] / total}) for d in data]


def held_out_loss(client: TrainingClient, data: list[Datum]) -> float:
    return client.forward(token_mean(data), "cross_entropy").result().metrics["loss:sum"]


def main(args: argparse.Namespace) -> dict[str, float]:
    problems = WordProblems()
    with LocalService().create_lora_training_client(args.model, rank=32, alpha=64, seed=args.seed) as client:
        renderer = Renderer(client.get_tokenizer(), model_name=args.model)
        held_out = [sft_datum(renderer, problems.test[index]) for index in range(args.eval_examples)]
        before = held_out_loss(client, held_out)
        print(f"held-out loss before: {before:.4f}")

        for step in range(args.steps):
            batch = [
                sft_datum(renderer, problems.train[step * args.batch_size + index]) for index in range(args.batch_size)
            ]
            gradient = client.forward_backward(token_mean(batch), "cross_entropy")
            learning_rate = args.learning_rate * (1 - step / args.steps)
            update = client.optim_step(AdamParams(learning_rate=learning_rate, grad_clip_norm=1.0))
            update.result()
            print(f"step {step + 1:2d}/{args.steps}  loss {gradient.result().metrics['loss:sum']:.4f}")

        after = held_out_loss(client, held_out)
        print(f"held-out loss after: {after:.4f}")
    return {"before": before, "after": after}


if __name__ == "__main__":
    main(parser.parse_args())
