"""One answer to what ends a turn, for the mask, the sampler, the server and the text that rewards see."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cookbook.backends.local import LocalService
from cookbook.core.examples import Message
from cookbook.core.turns import end_of_turn_tokens, set_generation_eos
from cookbook.core.types import AdamParams, Datum, ModelInput, SamplingParams
from cookbook.data.rendering import Renderer
from cookbook.serve.adapters.openai.responses import choice_of

LETTERS = {chr(code): code - 32 for code in range(32, 127)}
ADDED = ("</s>", "<done>", "<call_done>", "<user>", "<assistant>")
TEMPLATE = """{%- for m in messages %}{{ '<' + m.role + '>' + m.content }}
{%- if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}<call_done>
{%- elif m.role == 'assistant' %}END{% endif %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
CHAT: list[Message] = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "#### 4"}]


def tokenizer(end: str = "<done>", special: bool = True) -> PreTrainedTokenizerFast:
    """Characters, and a template that ends an answer with `end` while the tokenizer's eos token is `</s>`."""
    base = Tokenizer(models.BPE(vocab=LETTERS, merges=[]))
    base.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    base.decoder = decoders.Fuse()
    tokens = [AddedToken(token, special=special or token == "</s>", normalized=False) for token in ADDED]
    base.add_tokens(tokens)
    base.add_special_tokens([token for token in tokens if token.special])
    fast = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="</s>", clean_up_tokenization_spaces=False)
    fast.chat_template = TEMPLATE.replace("END", end)
    return fast


def names(fast: PreTrainedTokenizerFast) -> list[str]:
    return [str(fast.decode([token])) for token in end_of_turn_tokens(fast)]


@pytest.mark.parametrize("special", [True, False])
def test_the_templates_end_comes_first_then_those_of_tokenizer_and_generation_config(special: bool):
    fast = tokenizer(special=special)
    assert names(fast) == ["<done>", "<call_done>", "</s>"]
    set_generation_eos(fast, [LETTERS["~"], end_of_turn_tokens(fast)[0]])
    assert names(fast) == ["<done>", "<call_done>", "</s>", "~"]
    fast.chat_template = "{{ raise_exception('no') }}"
    assert names(fast) == ["</s>", "~", "<done>"]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("end", ["<done>", "\n<done>\n", "<done></s>", " <done>\n</s>\n"])
def test_the_mask_ends_where_sampling_stops_and_the_text_is_the_content(end: str, special: bool):
    fast = tokenizer(end, special)
    renderer = Renderer(fast)
    tokens, loss_mask = renderer.supervised([*CHAT, *CHAT], "all_assistant")
    trained = [token for token, own in zip(tokens, loss_mask, strict=True) if own]
    assert str(fast.decode(trained)).split() == ["####", "4<done>####", "4<done>"] or end[0] in "\n "
    assert trained[-1] in renderer.stop_tokens and "</s>" not in str(fast.decode(trained))
    assert sum(token in renderer.stop_tokens for token in trained) == 2
    turn = trained[: len(trained) // 2]
    assert turn[-1] in renderer.stop_tokens and renderer.text(turn).strip() == "#### 4"


def save_model(folder: Path, generation_eos: int | list[int] | None, end: str = "<done>") -> str:
    fast = tokenizer(end)
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=96,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = generation_eos
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("ending", "generation_eos"), [("<done>", None), ("~", [LETTERS["~"], 95]), ("~", LETTERS["~"]), ("</s>", None)]
)
def test_what_is_trained_is_sampled_to_its_end(tmp_path: Path, ending: str, generation_eos: int | list[int] | None):
    service = LocalService(device="cpu", state_dir=str(tmp_path / "state"))
    client = service.create_lora_training_client(save_model(tmp_path / "model", generation_eos), rank=None, seed=0)
    fast = client.get_tokenizer()
    renderer = Renderer(fast)
    prompt = renderer.prompt(CHAT[:1])
    end = fast.convert_tokens_to_ids(ending)
    assert isinstance(end, int)
    tokens = [*prompt, *renderer.tokens("#### 4"), end, *renderer.tokens("more")]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})
    for _ in range(40):
        client.forward_backward([datum], "cross_entropy")
        client.optim_step(AdamParams(learning_rate=1e-2)).result()
    sampler = client.save_weights_and_get_sampling_client()
    for stop in ((), renderer.stop_tokens):
        params = SamplingParams(max_tokens=30, temperature=0, stop=stop)
        (sequence,) = sampler.sample(ModelInput.from_ints(prompt), 1, params).result().sequences
        assert (sequence.stop_reason, sequence.tokens[-1]) == ("eos", end)
        assert renderer.text(sequence.tokens) == "#### 4"
        assert choice_of(fast, sequence, ()).text == "#### 4"
    service.stop()


def test_a_tokenizer_without_a_template_has_its_eos_alone():
    bare = SimpleNamespace(chat_template=None, eos_token_id=7)
    assert end_of_turn_tokens(bare) == (7,)  # pyright: ignore[reportArgumentType]
