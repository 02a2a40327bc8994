"""Adapters of experts: any rank, in bfloat16, on weights published in MXFP4, and what has none."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from cookbook.backends.local import LocalService
from cookbook.backends.local.experts import ExpertAdapter, adapt
from cookbook.core.errors import BackendError
from cookbook.core.types import ModelInput
from tests.backends.architectures import ARCHITECTURES, save_architecture
from tests.backends.local_model import disturb, random_tokens, save_tokenizer, trained_weights

PROMPT = random_tokens(0, 20)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    service = LocalService(device="cpu", dtype="float32", state_dir=str(tmp_path / "state"))
    yield service
    service.stop()


def plain_logprobs(folder: str, export: str) -> torch.Tensor:
    """Of the prompt's tokens, by transformers and peft alone."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), export)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPT])).logits[0]
    return logits.log_softmax(-1)[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])]


def check_export(service: LocalService, folder: str, rank: int) -> None:
    client = service.create_lora_training_client(folder, rank=rank, alpha=8, seed=0)
    disturb(client)
    sampler = client.save_weights_and_get_sampling_client()
    computed = torch.tensor(sampler.compute_logprobs(ModelInput.from_ints(PROMPT)).result()[1:])
    export = client.save_weights_for_sampler("export").result().path
    torch.testing.assert_close(computed, plain_logprobs(folder, export), atol=1e-4, rtol=0)


def set_quantization(folder: Path, quantization: dict[str, object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])  # weights [experts, out, in] and [experts, in, out]
@pytest.mark.parametrize("rank", [1, 3])  # not of the kernel's alignment
def test_any_rank_equals_plain_peft(service: LocalService, tmp_path: Path, name: str, rank: int) -> None:
    check_export(service, save_architecture(name, tmp_path / "model"), rank)


def test_the_same_seed_gives_the_same_adapter_and_leaves_the_global_generator(
    service: LocalService, tmp_path: Path
) -> None:
    folder = save_architecture("deepseek-v3", tmp_path / "model")
    torch.manual_seed(0)
    first, second, other = (service.create_lora_training_client(folder, rank=4, seed=seed) for seed in (1, 1, 2))
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), drawn)
    for key, values in trained_weights(first).items():
        assert torch.equal(values, trained_weights(second)[key])
        if ".lora_B." in key:
            assert (values == 0).all()
        else:
            assert not torch.equal(values, trained_weights(other)[key])
            assert values.abs().max() <= values.shape[1] ** -0.5 and values.abs().max() > 0.5 * values.shape[1] ** -0.5


def test_in_bfloat16_a_small_update_is_not_lost() -> None:
    """Beside weights of 1 an update of 1e-4 would round away. The rows make W x zero, so only the adapter is left."""
    config = AutoConfig.for_model("qwen3_moe", hidden_size=32, moe_intermediate_size=16, num_experts=2)
    experts = Qwen3MoeExperts(config).to(torch.bfloat16).requires_grad_(False)
    for values in experts.parameters():
        values.fill_(1.0)
    experts.act_fn = torch.nn.Identity()
    experts._apply_gate = lambda values: values[:, :16]
    adapters = {name: ExpertAdapter(experts, name, rank=4, scale=2.0) for name in ("gate_up_proj", "down_proj")}
    generator = torch.Generator().manual_seed(0)
    for adapter in adapters.values():
        for part, shape in adapter.shapes.items():
            adapter.weights[part] = torch.nn.Parameter(torch.randn(shape, generator=generator) * 1e-2)
    adapt(experts, adapters)
    half = torch.randn(5, 16, generator=generator).to(torch.bfloat16)
    rows = torch.cat([half, -half], 1)
    chosen, weights = torch.tensor([[0], [1], [1], [0], [1]]), torch.ones(5, 1, dtype=torch.bfloat16)
    updates = adapters["gate_up_proj"].delta().float()[chosen[:, 0], :16]
    inner = (updates @ rows.float()[:, :, None])[:, :, 0]
    expected = inner.sum(1, keepdim=True)
    result = experts(rows, chosen, weights).float()
    torch.testing.assert_close(result, expected.expand_as(result), rtol=0.05, atol=1e-4)


def test_experts_published_in_mxfp4_train_and_export(service: LocalService, tmp_path: Path) -> None:
    folder = Path(save_architecture("gpt-oss", tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(key).shape
        shape = experts, outputs, inputs // 32
        tensors[f"{key}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(122, 125, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    set_quantization(folder, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    check_export(service, str(folder), rank=4)
    assert "experts" in service.create_lora_training_client(str(folder), rank=4).trainable.kinds


def test_weights_published_in_fp8_are_dequantised(service: LocalService, tmp_path: Path) -> None:
    folder = Path(save_architecture("qwen3-moe", tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        scale = tensors[key].abs().max() / 448
        tensors[key] = (tensors[key] / scale).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = scale.reshape(1, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    set_quantization(folder, quantization)
    check_export(service, str(folder), rank=4)


def test_weights_quantised_in_another_way_are_refused(service: LocalService, random_model: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(random_model, tmp_path / "model"))
    set_quantization(folder, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(BackendError, match=r"is quantised with gptq; .* choose the model's unquantised version"):
        service.create_lora_training_client(str(folder), rank=4)


def test_layers_that_read_images_have_no_adapter(service: LocalService, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tokenizer(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 97, "head_dim": 8, "num_key_value_heads": 1, "query_pre_attn_scalar": 8}
    config = AutoConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config={**sizes, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    adapted = trained_weights(service.create_lora_training_client(str(folder), rank=4))
    assert adapted and all(".language_model.layers." in key for key in adapted)
    check_export(service, str(folder), rank=4)


def test_full_parameter_training_covers_experts(service: LocalService, tmp_path: Path) -> None:
    folder = save_architecture("mixtral", tmp_path / "model")
    client = service.create_lora_training_client(folder, rank=None)
    assert set(client.trainable.kinds) == {"attention", "router", "experts", "embeddings", "norms", "output layer"}
    assert client.trainable.trained == client.trainable.total
    before = trained_weights(client)
    disturb(client)
    moved = {key for key, values in trained_weights(client).items() if not torch.equal(values, before[key])}
    assert any(".experts.gate_up_proj" in key for key in moved)


def test_experts_of_an_unknown_kind_are_refused(service: LocalService, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tokenizer(folder)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "kv_channels": 8}
    config = AutoConfig.for_model("jetmoe", **sizes, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with pytest.raises(BackendError, match=r"experts of type JetMoeParallelExperts.*lora\.rank=null"):
        service.create_lora_training_client(str(folder), rank=4)


def test_every_mixture_of_experts_of_the_matrix_has_experts() -> None:
    assert sum(architecture.experts > 0 for architecture in ARCHITECTURES.values()) >= 14
