"""Tiny random models of many architectures, by their transformers model type."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.backends.local_model import EOS, save_tokenizer

VOCABULARY = 97
CONTEXT = 64

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}

_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
"""Attention with compressed keys and values, as in DeepSeek."""

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Architecture:
    """A model type with the sizes in which it differs, and what an adapter must cover and leave out."""

    model_type: str
    sizes: dict[str, Any] = field(default_factory=dict)
    experts: int = 0
    """Number of experts; 0 for a dense model."""

    shared: tuple[str, ...] = ()
    """Parts of names of dense layers in a mixture of experts, which have adapters too."""


def _experts(model_type: str, shared: tuple[str, ...] = (), key: str = "num_experts", **sizes: Any) -> Architecture:
    common = {key: 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Architecture(model_type, {**common, **sizes}, 8, shared)


_GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama"),
    "qwen2": Architecture("qwen2", {"tie_word_embeddings": True}),
    "qwen3": Architecture("qwen3"),
    "mistral-sliding": Architecture("mistral", {"sliding_window": 12}),
    "gemma": Architecture("gemma"),
    "gemma2-softcapping": Architecture(
        "gemma2",
        {
            "query_pre_attn_scalar": 8,
            "sliding_window": 12,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "gemma3": Architecture("gemma3_text", {"query_pre_attn_scalar": 8, "sliding_window": 12}),
    "phi3": Architecture("phi3"),
    "phi3-longrope": Architecture(
        "phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 32, "max_position_embeddings": 64}
    ),
    "olmo2": Architecture("olmo2"),
    "olmo3": Architecture("olmo3", {"sliding_window": 12}),
    "glm4": Architecture("glm4"),
    "granite": Architecture(
        "granite",
        {"logits_scaling": 4.0, "residual_multiplier": 0.7, "embedding_multiplier": 3.0, "attention_multiplier": 0.3},
    ),
    "cohere": Architecture("cohere", {"logit_scale": 0.25}),
    "cohere2": Architecture("cohere2", {"logit_scale": 0.25, "sliding_window": 12}),
    "smollm3": Architecture("smollm3"),
    "starcoder2": Architecture("starcoder2"),
    "gpt2": Architecture("gpt2"),
    "gpt-oss": _experts("gpt_oss", key="num_local_experts", sliding_window=12, intermediate_size=32),
    "mixtral": _experts("mixtral", key="num_local_experts", intermediate_size=16),
    "olmoe": _experts("olmoe", intermediate_size=16),
    "qwen2-moe": _experts("qwen2_moe", ("shared_expert.",), shared_expert_intermediate_size=16),
    "qwen3-moe": _experts("qwen3_moe"),
    "deepseek-v2": _experts(
        "deepseek_v2", ("mlp.gate_proj", "shared_experts"), "n_routed_experts", **_LATENT, **_GROUPS
    ),
    "deepseek-v3": _experts(
        "deepseek_v3", ("mlp.gate_proj", "shared_experts"), "n_routed_experts", **_LATENT, **_GROUPS
    ),
    "glm4-moe": _experts("glm4_moe", ("mlp.gate_proj", "shared_experts"), "n_routed_experts", **_GROUPS),
    "minimax-m2": _experts("minimax_m2", key="num_local_experts", intermediate_size=16),
    "dots1": _experts("dots1", ("mlp.gate_proj", "shared_experts"), "n_routed_experts", **_GROUPS),
    "ernie4.5-moe": _experts(
        "ernie4_5_moe",
        ("shared_experts",),
        "moe_num_experts",
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "hunyuan-v1-moe": _experts("hunyuan_v1_moe", ("shared_mlp",), moe_topk=2, intermediate_size=16),
    "phimoe": _experts("phimoe", key="num_local_experts", intermediate_size=16),
    "granitemoe": _experts("granitemoe", key="num_local_experts", intermediate_size=16, logits_scaling=4.0),
    "gemma4-moe": _experts(
        "gemma4_text",
        ("mlp.gate_proj",),
        enable_moe_block=True,
        top_k_experts=2,
        sliding_window=12,
        global_head_dim=8,
        num_global_key_value_heads=2,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCABULARY,
        num_kv_shared_layers=0,
        final_logit_softcapping=3.0,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def save_architecture(name: str, folder: Path) -> str:
    """Save a random model with weights large enough for sharp distributions. Returns the folder."""
    architecture = ARCHITECTURES[name]
    save_tokenizer(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(architecture.model_type, **{**_SIZES, **architecture.sizes})
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return str(folder)
