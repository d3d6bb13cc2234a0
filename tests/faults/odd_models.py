"""Small models of other kinds than `tiny`, with random weights large enough that a wrong KV byte changes the answer."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, Gemma3TextConfig, PretrainedConfig

from kvbaton.launch.models import resolve_model

SEED = 7
WINDOW_TOKENS = 100
VOCABULARY = {
    "vocab_size": 260,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 259,
    "max_position_embeddings": 4608,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}


def windowed() -> PretrainedConfig:
    """Two layers in three look back over a sliding window: several cache groups, of which two give up blocks."""
    return Gemma3TextConfig(
        **VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=WINDOW_TOKENS,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )


def latent() -> PretrainedConfig:
    """Multi-head latent attention: one compressed vector per token, which all heads share."""
    return DeepseekV2Config(
        **VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,  # the only size that vLLM's CPU kernel knows
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )


CONFIGS = {"windowed": windowed, "latent": latent}


def make_model(name: str, folder: Path) -> Path:
    """A folder that `vllm serve` takes."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve_model("tiny")) / file, folder)
    return folder
