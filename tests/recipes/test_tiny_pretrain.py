from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cookbook.data.word_problems import WordProblems
from recipes.tiny_pretrain.__main__ import save
from recipes.tiny_pretrain.card import Measured, write_card
from recipes.tiny_pretrain.train import IGNORED, Settings, batches, build_model, build_tokenizer, demonstration, train

SMALL = Settings(
    steps=12, batch_size=8, habit_steps=4, warmup_steps=2, hidden_size=32, intermediate_size=64, layers=2, heads=2, vocab_size=400
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(SMALL)


def test_a_few_steps_reduce_the_loss_and_the_seed_fixes_tokenizer_and_weights(tokenizer: PreTrainedTokenizerFast) -> None:
    assert build_tokenizer(SMALL).get_vocab() == tokenizer.get_vocab()
    models = [build_model(SMALL, tokenizer) for _ in range(2)]
    losses = [list(train(model, tokenizer, SMALL)) for model in models]
    assert losses[0] == losses[1] and len(losses[0]) == SMALL.steps
    assert losses[0][-1] < losses[0][0] - 0.5
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_loss_counts_the_assistant_and_its_end_of_turn_and_habits_come_last(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = WordProblems().train[:16]
    settings = replace(SMALL, steps=2, habit_steps=1, worked_shares=(0.0, 0.0))
    batch = zip(batches(tokenizer, examples, settings), (examples[:8], examples[8:]), strict=True)
    for step, ((input_ids, labels), shown) in enumerate(batch):
        for tokens, row, example in zip(input_ids, labels, shown, strict=True):
            spoken = row[row != IGNORED]
            expected = example.extra["solution"] if step == 0 else f"#### {example.answer}"
            assert torch.equal(tokens[row != IGNORED], spoken)
            assert tokenizer.decode(spoken.tolist()) == expected + "<|end|>"


def test_diet_follows_the_phrasing() -> None:
    examples = WordProblems().train[:600]
    assert all(demonstration(e, (1.0, 1.0)) == e.extra["solution"] for e in examples)
    for phrasing, share in enumerate((0.8, 0.1)):
        mine = [e for e in examples if e.extra["phrasing"] == phrasing]
        worked = [demonstration(e, (0.8, 0.1)) == e.extra["solution"] for e in mine]
        assert sum(worked) / len(worked) == pytest.approx(share, abs=0.08)
        assert all(demonstration(e, (0.0, 0.0)) == f"#### {e.answer}" for e in mine)


def test_what_is_saved_loads_and_has_a_card(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model(SMALL, tokenizer)
    save(model, tokenizer, tmp_path)
    write_card(tmp_path, SMALL, Measured(parameters=model.num_parameters(), examples=200, greedy=0.5, sampled=0.456))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert loaded.generation_config.eos_token_id == AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    assert "45.6%" in (tmp_path / "README.md").read_text(encoding="utf-8")
