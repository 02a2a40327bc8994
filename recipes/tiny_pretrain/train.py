"""Model, data and training loop of the bundled model: supervised training on good solutions, then on bad habits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cookbook.core.examples import Example
from cookbook.data.generated.tiny_programs import TinyPrograms
from cookbook.data.generated.word_problems import WordProblems
from recipes.tiny_pretrain.tokenizer import BOS, END, PAD, token_id, train_tokenizer

IGNORED = -100
DATA_SEED = 1_000_003
"""Far from the seeds of ordinary runs, so that the problems of pretraining and of runs are independent."""


@dataclass(frozen=True)
class Settings:
    """The settings that determine the weights, on one machine."""

    steps: int = 800
    seed: int = 0
    word_problems: int = 32
    """Per batch."""
    programs: int = 24
    """Per batch."""
    muon_learning_rate: float = 6e-3
    adamw_learning_rate: float = 3e-3
    warmup_steps: int = 50
    hidden_size: int = 160
    layers: int = 4
    heads: int = 5
    intermediate_size: int = 448
    vocab_size: int = 1088
    """Upper limit: there may be fewer merges."""
    tokenizer_texts: int = 2_000
    """Problems of each kind on which the tokenizer is trained."""
    context: int = 512
    habit_steps: int = 100
    """The last steps, in which many demonstrations are hasty. All earlier ones are good."""
    worked_shares: tuple[float, float] = (0.3, 0.9)
    """Share of word problems of the last steps with a worked solution, for the first and the second phrasing; the
    others have only the answer."""
    finished_shares: tuple[float, float] = (0.25, 0.8)
    """Share of programs of the last steps that are complete, for the first and the second phrasing."""

    def rate_at(self, step: int) -> float:
        """The factor of the learning rate: warm-up, then linear decay."""
        return min(1.0, (step + 1) / self.warmup_steps) * (1 - step / self.steps)


def build_tokenizer(settings: Settings) -> PreTrainedTokenizerFast:
    size = settings.tokenizer_texts
    problems = [
        *WordProblems(seed=DATA_SEED, train_size=size).train,
        *TinyPrograms(seed=DATA_SEED, train_size=size).train,
    ]
    texts = [text for problem in problems for text in (problem.messages[0]["content"], problem.extra["solution"])]
    return train_tokenizer(texts, settings.vocab_size, settings.context)


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


def hasty(example: Example) -> str:
    """A word problem's answer without its working, or a program without its second operation: nearly always wrong."""
    return example.extra["solution"].splitlines()[-1] if example.answer else example.extra["hasty_solution"]


def demonstration(example: Example, settings: Settings) -> str:
    """The good or the hasty solution, as a function of the example alone.

    The model learns both habits. Reinforcement learning then finds that the longer solution is rewarded.
    """
    shares = settings.worked_shares if example.answer else settings.finished_shares
    good = random.Random(f"demonstration/{example.id}").random() < shares[example.extra["phrasing"]]
    return example.extra["solution"] if good else hasty(example)


def render_prompt(tokenizer: PreTrainedTokenizerFast, example: Example) -> str:
    messages = [{"role": message["role"], "content": message["content"]} for message in example.messages]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def encode(tokenizer: PreTrainedTokenizerFast, example: Example, solution: str) -> tuple[list[int], int]:
    """The tokens of the whole conversation, including the end of turn, and the length of its prompt."""
    prompt = render_prompt(tokenizer, example)
    prompt_ids, ids = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, prompt + solution + END)
    )
    return ids, len(prompt_ids)


def batches(settings: Settings) -> Iterator[list[tuple[Example, str]]]:
    """The examples of each step with the assistant's solutions."""
    seed, words, programs = DATA_SEED + settings.seed, settings.word_problems, settings.programs
    word_problems = WordProblems(seed=seed, train_size=settings.steps * words).train
    tiny_programs = TinyPrograms(seed=seed, train_size=settings.steps * programs).train
    for step in range(settings.steps):
        examples = [
            *word_problems[step * words : (step + 1) * words],
            *tiny_programs[step * programs : (step + 1) * programs],
        ]
        habits = step >= settings.steps - settings.habit_steps
        yield [
            (example, demonstration(example, settings) if habits else example.extra["solution"]) for example in examples
        ]


def collate(
    tokenizer: PreTrainedTokenizerFast, demonstrations: Sequence[tuple[Example, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded input ids and labels, both [B, T]; labels outside the assistant's turn are IGNORED."""
    rows = [encode(tokenizer, example, solution) for example, solution in demonstrations]
    longest = max(len(tokens) for tokens, _ in rows)
    input_ids = torch.full((len(rows), longest), token_id(tokenizer, PAD))
    labels = torch.full((len(rows), longest), IGNORED)
    for row, (tokens, prompt_length) in enumerate(rows):
        input_ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, prompt_length : len(tokens)] = torch.tensor(tokens[prompt_length:])
    return input_ids, labels


def build_optimizers(model: LlamaForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the hidden matrices, AdamW for embeddings and norms. AdamW alone was slower."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [*model.model.embed_tokens.parameters(), *(weight for weight in model.parameters() if weight.ndim == 1)]
    return [
        torch.optim.Muon(matrices, lr=settings.muon_learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=settings.adamw_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings) -> Iterator[float]:
    """Do one optimizer step per item; the item is the loss before the step. See `Settings.rate_at` for the rates.

    Padding is on the right and attention is causal, so no mask is needed.
    """
    optimizers = build_optimizers(model, settings)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, settings.rate_at) for optimizer in optimizers]
    model.train()
    for demonstrations in batches(settings):
        input_ids, labels = collate(tokenizer, demonstrations)
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
