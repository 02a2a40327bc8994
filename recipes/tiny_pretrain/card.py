"""The card that travels with the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipes.tiny_pretrain.train import Settings

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
language: en
---
# tiny

A Llama-architecture model of {parameters:,} parameters for rehearsing post-training on a laptop. It solves generated
grade-school word problems (`cookbook.data.word_problems`) in GSM8K format, and leaves room to learn better by reinforcement.

| | |
|---|---|
| shape | hidden {s.hidden_size}, layers {s.layers}, heads {s.heads}, context {s.context}, tied embeddings, float32 |
| tokenizer | byte-level BPE, {s.vocab_size} entries at most, every digit a token; learned on word problems and small Python programs |
| turns | `<\\|user\\|>question<\\|end\\|><\\|assistant\\|>solution<\\|end\\|>`; `<\\|end\\|>` is the end-of-sequence token |
| data | {problems:,} problems of the training class; none of the held-out class, whatever the seed |
| diet | worked solutions; in the last {s.habit_steps} steps only {first:.0%} (first phrasing of a problem) or {second:.0%} (second) \
of the demonstrations show the working, the others state an answer |
| training | {s.steps} steps of {s.batch_size}, Muon at {s.muon_learning_rate:g}, AdamW at {s.adamw_learning_rate:g}, \
warm-up and linear decay, \
loss on the assistant's tokens, seed {s.seed} |
| held-out accuracy, greedy | {m.greedy:.1%} of {m.examples} |
| held-out accuracy, temperature 1 | {m.sampled:.1%} of {m.examples} |

The accuracy is low on purpose. The last steps of training gave it the habit of blurting out an answer about half of the time,
and such an answer is nearly always wrong. It can solve most problems when it shows its working, though its arithmetic slips
when sampled: that working pays is what reinforcement learning has to find.

Made by: `python -m recipes.tiny_pretrain --steps {s.steps} --seed {s.seed} --out DIR`
(the same weights again on the same machine; elsewhere the last bits of a sum may differ, and with them the accuracy a little).

It knows nothing else: no facts, no language beyond these problems. It is a test object, not an assistant.
"""


@dataclass(frozen=True)
class Measured:
    """Held-out accuracies, as shares of `examples`."""

    parameters: int
    examples: int
    greedy: float
    sampled: float


def write_card(folder: Path, settings: Settings, measured: Measured) -> None:
    first, second = settings.worked_shares
    problems = settings.steps * settings.batch_size
    text = CARD.format(s=settings, m=measured, parameters=measured.parameters, problems=problems, first=first, second=second)
    (folder / "README.md").write_text(text, encoding="utf-8")
