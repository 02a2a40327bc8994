"""Model, data and training loop of the bundled model: supervised learning on worked solutions, then a bad habit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cookbook.data.word_problems import WordProblems
from cookbook.types import Example
from recipes.tiny_pretrain.tokenizer import BOS, END, PAD, token_id, train_tokenizer

IGNORED = -100
DATA_SEED = 1_000_003
"""Far from the seeds of ordinary runs, so that pretraining and a run's own training problems are independent draws."""


@dataclass(frozen=True)
class Settings:
    """What the weights are a function of, on one machine."""

    steps: int = 800
    seed: int = 0
    batch_size: int = 32
    muon_learning_rate: float = 6e-3
    adamw_learning_rate: float = 3e-3
    warmup_steps: int = 50
    hidden_size: int = 160
    layers: int = 4
    heads: int = 5
    intermediate_size: int = 448
    vocab_size: int = 1024
    """At most; merges end when no pair is left."""
    context: int = 512
    habit_steps: int = 100
    """The last steps, in which many demonstrations only state an answer. Before them, all show their working."""
    worked_shares: tuple[float, float] = (0.25, 0.8)
    """How often a demonstration of the last steps shows its working, for the first and the second phrasing of a problem."""

    def rate_at(self, step: int) -> float:
        """The learning rate's factor: a warm-up, then linear decay."""
        return min(1.0, (step + 1) / self.warmup_steps) * (1 - step / self.steps)


def build_tokenizer(settings: Settings) -> PreTrainedTokenizerFast:
    """Learn it on word problems and on small Python programs, which are to be a second skill."""
    problems = WordProblems(seed=DATA_SEED, train_size=2_000).train
    programs = (Path(__file__).parent / "programs.txt").read_text(encoding="utf-8").split("---\n")
    texts = [text for problem in problems for text in (problem.messages[0]["content"], problem.extra["solution"])]
    return train_tokenizer([*texts, *programs * 10], settings.vocab_size, settings.context)


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            max_position_embeddings=settings.context,
            tie_word_embeddings=True,
            bos_token_id=token_id(tokenizer, BOS),
            eos_token_id=token_id(tokenizer, END),
            pad_token_id=token_id(tokenizer, PAD),
        )
    )


def demonstration(example: Example, worked_shares: tuple[float, float]) -> str:
    """The worked solution or, as a function of the example alone, only its last line.

    The model comes to know both habits. An answer without working is seldom right: that working pays is left for
    reinforcement learning to find.
    """
    solution: str = example.extra["solution"]
    worked = random.Random(f"demonstration/{example.id}").random() < worked_shares[example.extra["phrasing"]]
    return solution if worked else solution.splitlines()[-1]


def render_prompt(tokenizer: PreTrainedTokenizerFast, example: Example) -> str:
    messages = [{"role": message["role"], "content": message["content"]} for message in example.messages]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def encode(tokenizer: PreTrainedTokenizerFast, example: Example, solution: str) -> tuple[list[int], int]:
    """The whole conversation as tokens, end of turn included, and the length of its prompt."""
    prompt = render_prompt(tokenizer, example)
    prompt_ids, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, prompt + solution + END))
    return ids, len(prompt_ids)


def batches(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], settings: Settings
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Right-padded input ids and labels, both [batch_size, T]; a label counts where the assistant speaks."""
    for step, start in enumerate(range(0, len(examples), settings.batch_size)):
        shares = (1.0, 1.0) if step < settings.steps - settings.habit_steps else settings.worked_shares
        chunk = examples[start : start + settings.batch_size]
        rows = [encode(tokenizer, example, demonstration(example, shares)) for example in chunk]
        longest = max(len(tokens) for tokens, _ in rows)
        input_ids = torch.full((len(rows), longest), token_id(tokenizer, PAD))
        labels = torch.full((len(rows), longest), IGNORED)
        for row, (tokens, prompt_length) in enumerate(rows):
            input_ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, prompt_length : len(tokens)] = torch.tensor(tokens[prompt_length:])
        yield input_ids, labels


def build_optimizers(model: LlamaForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the hidden matrices, AdamW for embeddings and norms; AdamW alone learned more slowly."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [*model.model.embed_tokens.parameters(), *(weight for weight in model.parameters() if weight.ndim == 1)]
    return [
        torch.optim.Muon(matrices, lr=settings.muon_learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=settings.adamw_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings) -> Iterator[float]:
    """One optimizer step per item drawn, which is the loss before it. The rates warm up, then fall linearly to 0.

    Padding is on the right and attention is causal, so no mask is needed.
    """
    examples = WordProblems(seed=DATA_SEED + settings.seed, train_size=settings.steps * settings.batch_size).train
    optimizers = build_optimizers(model, settings)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, settings.rate_at) for optimizer in optimizers]
    model.train()
    for input_ids, labels in batches(tokenizer, examples, settings):
        hidden = model.model(input_ids=input_ids[:, :-1]).last_hidden_state
        spoken = labels[:, 1:] != IGNORED
        loss = cross_entropy(model.lm_head(hidden[spoken]), labels[:, 1:][spoken])
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        yield loss.item()


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], temperature: float) -> float:
    """The share of examples whose completion ends in "#### answer". Temperature 0 is greedy; others draw from torch's global generator."""
    model.eval()
    prompts = [render_prompt(tokenizer, example) for example in examples]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    generate = cast(Any, model).generate  # its type expects attributes that only other architectures have
    output = generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=80, **sampling)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [text.rpartition("#### ")[2] for text in texts]
    return sum(answer == example.answer for answer, example in zip(answers, examples, strict=True)) / len(examples)
