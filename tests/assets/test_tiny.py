"""The bundled model, loaded by plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from cookbook.data.generated.tiny_programs import TinyPrograms
from cookbook.data.generated.word_problems import WordProblems
from cookbook.sandbox.local import LocalSandbox
from recipes.tiny_pretrain.measure import accuracy, all_pass
from rewards.code import CodeReward

FOLDER = Path(__file__).parents[2] / "cookbook" / "assets" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(FOLDER)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    loaded = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded


def test_it_is_a_small_llama_with_a_card(model: LlamaForCausalLM) -> None:
    assert model.num_parameters() <= 4_000_000
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) <= 10_000_000
    assert model.config.max_position_embeddings >= 512
    assert "held-out accuracy" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_turn_ends_in_eos_and_padding_is_another_token(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)


def test_chat_template_extends_its_own_prefix(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "#### 3"},
        {"role": "tool", "content": "7"},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole == "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>#### 3<|end|><|tool|>7<|end|>"
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert isinstance(whole, str) and isinstance(prompt, str)
    assert whole.startswith(prompt) and prompt.endswith("<|assistant|>")
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "x"}], tokenize=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  two  spaces \n\n\ttab\r\n",
        "Ünïcode \u2212 数学 🙂\u200d\U0001f680 \x00\x7f",
        "x = [1, 2]\n    print(x)  # ok",
    ],
)
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_problems_and_programs_round_trip_in_few_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    for example in TinyPrograms().test[:100]:
        prompt, program = example.messages[0]["content"], example.extra["solution"]
        for text, longest in ((prompt, 60), (program, 75)):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids) == text
            assert len(ids) <= longest


def test_digits_are_tokens_of_their_own(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer.tokenize("<<12*345=4140>>4140 and 2024")
    assert all(len(token) == 1 for token in tokens if any(char.isdigit() for char in token))


def test_accuracy_on_word_problems_leaves_room_to_learn(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    held_out = WordProblems().test[:200]
    torch.manual_seed(0)
    assert 0.45 <= accuracy(model, tokenizer, held_out, temperature=0) <= 0.60
    assert 0.45 <= accuracy(model, tokenizer, held_out, temperature=1) <= 0.60


def test_programs_leave_room_to_learn(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    held_out = TinyPrograms().test[:200]
    reward = CodeReward(sandbox=LocalSandbox())
    torch.manual_seed(0)
    assert 0.35 <= all_pass(model, tokenizer, held_out, temperature=0, reward=reward) <= 0.60
    assert 0.35 <= all_pass(model, tokenizer, held_out, temperature=1, reward=reward) <= 0.60
