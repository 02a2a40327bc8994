"""The model card that is written beside the weights."""

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

A Llama-architecture model of {parameters:,} parameters for trying out post-training on a laptop. It solves generated
grade-school word problems (`cookbook.data.generated.word_problems`) in GSM8K format and writes small Python programs
(`cookbook.data.generated.tiny_programs`), and leaves room to learn both better by reinforcement.

| | |
|---|---|
| shape | hidden {s.hidden_size}, layers {s.layers}, heads {s.heads}, context {s.context}, tied embeddings, float32 |
| tokenizer | byte-level BPE, {s.vocab_size} entries at most, every digit a token; trained on both kinds of problem |
| turns | `<\\|user\\|>question<\\|end\\|><\\|assistant\\|>solution<\\|end\\|>`; `<\\|end\\|>` ends the sequence; \
programs have no code fence |
| data | {word_problems:,} word problems and {programs:,} programs of the training split; none of the held-out split |
| data mixture | good solutions, except for the last {s.habit_steps} steps: there {w[0]:.0%} (first phrasing) or \
{w[1]:.0%} (second) of the word problems are worked out, the others only answered; {f[0]:.0%} or {f[1]:.0%} of the \
programs are complete, the others stop after the first operation |
| training | {s.steps} steps of {s.word_problems} + {s.programs}, Muon at {s.muon_learning_rate:g}, AdamW at \
{s.adamw_learning_rate:g}, warm-up and linear decay, loss on the assistant's tokens, seed {s.seed} |
| word problems: held-out accuracy, greedy | {m.words_greedy:.1%} of {m.examples} |
| word problems: held-out accuracy, temperature 1 | {m.words_sampled:.1%} of {m.examples} |
| programs: all five tests passed, greedy | {m.programs_greedy:.1%} of {m.examples} held-out tasks |
| programs: all five tests passed, temperature 1 | {m.programs_sampled:.1%} of {m.examples} held-out tasks |

The accuracy is low on purpose. In the last steps of training the model learned to be hasty about half of the time: it
states an answer without working, or prints after the first of the two operations of a task. Either is nearly always
wrong. It can solve most problems when it shows its working, and write most programs when it completes them, though it
makes mistakes when sampled. Reinforcement learning has to find that the longer solutions are rewarded.

Made by: `python -m recipes.tiny_pretrain --steps {s.steps} --seed {s.seed} --out DIR`
(the same weights again on the same machine; elsewhere rounding may differ, and the accuracy slightly).

It knows nothing else: no facts, no language beyond these problems, no Python beyond these programs. It is a test model,
not an assistant.
"""


@dataclass(frozen=True)
class Measured:
    """Held-out accuracies, as shares of `examples` of each kind."""

    parameters: int
    examples: int
    words_greedy: float
    words_sampled: float
    programs_greedy: float
    programs_sampled: float


def write_card(folder: Path, settings: Settings, measured: Measured) -> None:
    text = CARD.format(
        s=settings,
        m=measured,
        w=settings.worked_shares,
        f=settings.finished_shares,
        parameters=measured.parameters,
        word_problems=settings.steps * settings.word_problems,
        programs=settings.steps * settings.programs,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
