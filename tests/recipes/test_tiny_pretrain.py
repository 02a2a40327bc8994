from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cookbook.data.generated.tiny_programs import TinyPrograms
from cookbook.data.generated.word_problems import WordProblems
from recipes.tiny_pretrain.__main__ import save
from recipes.tiny_pretrain.card import Measured, write_card
from recipes.tiny_pretrain.train import (
    IGNORED,
    Settings,
    batches,
    build_model,
    build_tokenizer,
    collate,
    demonstration,
    hasty,
    train,
)

SMALL = Settings(
    steps=12,
    word_problems=4,
    programs=4,
    habit_steps=4,
    warmup_steps=2,
    hidden_size=32,
    intermediate_size=64,
    layers=2,
    heads=2,
    vocab_size=400,
    tokenizer_texts=100,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(SMALL)


def test_a_few_steps_reduce_the_loss_and_the_seed_fixes_tokenizer_and_weights(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert build_tokenizer(SMALL).get_vocab() == tokenizer.get_vocab()
    models = [build_model(SMALL, tokenizer) for _ in range(2)]
    losses = [list(train(model, tokenizer, SMALL)) for model in models]
    assert losses[0] == losses[1] and len(losses[0]) == SMALL.steps
    assert losses[0][-1] < losses[0][0] - 0.5
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_batch_has_both_skills_and_habits_come_last() -> None:
    steps = list(batches(replace(SMALL, steps=3, habit_steps=1, worked_shares=(0.0, 0.0), finished_shares=(0.0, 0.0))))
    for number, demonstrations in enumerate(steps):
        kinds = [example.id.split("/")[0] for example, _ in demonstrations]
        assert kinds == ["word_problems"] * SMALL.word_problems + ["tiny_programs"] * SMALL.programs
        assert {example.id.split("/")[2] for example, _ in demonstrations} == {"train"}
        assert all(
            text == (hasty(example) if number == 2 else example.extra["solution"]) for example, text in demonstrations
        )
    ids = [example.id for demonstrations in steps for example, _ in demonstrations]
    assert len(set(ids)) == len(ids)


def test_loss_counts_the_assistant_and_its_end_of_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    demonstrations = [
        (example, example.extra["solution"]) for example in (*WordProblems().train[:4], *TinyPrograms().train[:4])
    ]
    for tokens, row, (_, solution) in zip(*collate(tokenizer, demonstrations), demonstrations, strict=True):
        spoken = row[row != IGNORED]
        assert torch.equal(tokens[row != IGNORED], spoken)
        assert tokenizer.decode(spoken.tolist()) == solution + "<|end|>"


def test_demonstrations_follow_the_phrasing() -> None:
    settings = replace(SMALL, worked_shares=(0.8, 0.1), finished_shares=(0.1, 0.8))
    for examples, shares in ((WordProblems().train[:600], (0.8, 0.1)), (TinyPrograms().train[:600], (0.1, 0.8))):
        for phrasing, share in enumerate(shares):
            mine = [example for example in examples if example.extra["phrasing"] == phrasing]
            good = [demonstration(example, settings) == example.extra["solution"] for example in mine]
            assert sum(good) / len(good) == pytest.approx(share, abs=0.08)


def test_haste_is_an_answer_without_working_or_a_program_without_its_second_operation() -> None:
    for example in WordProblems().train[:50]:
        assert hasty(example) == f"#### {example.answer}"
    for example in TinyPrograms().train[:50]:
        lines = example.extra["solution"].splitlines()
        start = hasty(example).splitlines()
        assert len(start) < len(lines) and start[:-1] == lines[: len(start) - 1] and start[-1].startswith("print(")


def test_what_is_saved_loads_and_has_a_card(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model(SMALL, tokenizer)
    save(model, tokenizer, tmp_path)
    measured = Measured(
        parameters=model.num_parameters(),
        examples=200,
        words_greedy=0.5,
        words_sampled=0.456,
        programs_greedy=0.5,
        programs_sampled=0.432,
    )
    write_card(tmp_path, SMALL, measured)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert loaded.generation_config.eos_token_id == AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "45.6%" in card and "43.2%" in card and "{" not in card
