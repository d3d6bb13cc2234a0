"""Writes the `tiny` model: a small random Qwen3 whose files are the same, byte for byte, on every machine.

Invariant: pure arithmetic on a fixed integer stream, no torch and no library default, so `WEIGHTS_SHA256` holds everywhere.
The shape is chosen for KV transfer, not for sense: eight layers and four KV heads split evenly over TP 1, 2 and 4, and the
greedy answer depends on the whole prompt, so a single lost or misplaced block shows. See models.py for who calls this.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvbaton.launch.remedy import usage_error

RECIPE = 1
"""Raise it when any file below changes; prepared folders with another number are made again."""

WEIGHTS_SHA256 = "4632c957e799a4d5615cc6ff7adecd0f68d094b6a9a085db8703b8cca11f326c"

HIDDEN = 256
LAYERS = 8
QUERY_HEADS = 8
KV_HEADS = 4
HEAD_DIM = 64
INTERMEDIATE = 512
MAX_POSITIONS = 16_384
INITIALIZER_RANGE = 0.1
QUERY_GAIN = 1.5
"""Weight of the query norms. At 1 attention is nearly an average and greedy text soon loops; at 2 rounding noise grows."""
SEED = 20_261_130

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
    "<|reserved_0|>",
    "<|reserved_1|>",
    "<|reserved_2|>",
    "<|reserved_3|>",
)
VOCABULARY = 256 + len(SPECIALS)
END_OF_TEXT, IM_START, IM_END, PAD = range(256, 260)

# Only these can win a greedy choice: one token is then one visible character, texts compare like token ids, and no
# streamed piece waits for the rest of a UTF-8 sequence (which would spoil every time to first token).
PRINTABLE = range(0x20, 0x7F)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Weights: TypeAlias = dict[str, npt.NDArray[np.uint16]]
"""Tensors as the bit patterns of bfloat16."""


def write_tiny(folder: Path) -> None:
    """`folder` holds everything `vllm serve` and AutoTokenizer need.

    Raises UsageError when the weights differ from the published hash, which only a broken numpy or CPU can cause.
    """
    weights = _make_weights()
    found = sha256_of(weights)
    if found != WEIGHTS_SHA256:
        raise usage_error(
            f"tiny model: the generated weights have SHA-256 {found}, not {WEIGHTS_SHA256}, so results would not be "
            "comparable with other machines",
            f"Reinstall numpy (found {np.__version__}); report it if that does not help.",
        )
    _write_safetensors(folder / "model.safetensors", weights)
    for name, content in _text_files().items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def sha256_of(weights: Weights) -> str:
    """A digest of names, shapes and contents that does not depend on any file format."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.shape}\n".encode())
        digest.update(tensor.astype("<u2").tobytes())
    return digest.hexdigest()


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.self_attn.q_proj.weight": (QUERY_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, QUERY_HEADS * HEAD_DIM),
            f"{at}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{at}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{at}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def _make_weights() -> Weights:
    stream = np.random.PCG64(SEED)
    weights: Weights = {}
    for name, shape in _shapes().items():
        if name.endswith("norm.weight"):
            gain = QUERY_GAIN if name.endswith("q_norm.weight") else 1.0
            weights[name] = _bfloat16(np.full(shape, gain, dtype=np.float32))
        else:
            weights[name] = _bfloat16(_bell_curve(stream, shape))
    unprintable = [token for token in range(VOCABULARY) if token not in PRINTABLE]
    weights["lm_head.weight"][unprintable] = 0
    return weights


def _bell_curve(stream: np.random.PCG64, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Nearly normal numbers of standard deviation INITIALIZER_RANGE: the sum of four uniform 16-bit integers.

    Integer sums are exact; a library's `normal` may round differently from CPU to CPU or release to release.
    """
    raw = np.asarray(stream.random_raw(int(np.prod(shape))), dtype="<u8")
    total = raw.view("<u2").reshape(*shape, 4).sum(axis=-1, dtype=np.int64) - 2 * 65_535
    deviation = (65_536**2 / 3) ** 0.5
    return np.asarray(total * (INITIALIZER_RANGE / deviation), dtype=np.float32)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_safetensors(path: Path, weights: Weights) -> None:
    """Source: the safetensors format: u64 header length, JSON header padded to 8 bytes, then the tensors in order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in weights.items():
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": (offset, offset + tensor.nbytes)}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in weights.values():
            file.write(tensor.astype("<u2").tobytes())


def _text_files() -> dict[str, object]:
    return {
        "config.json": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "torch_dtype": "bfloat16",
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": QUERY_HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "initializer_range": INITIALIZER_RANGE,
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": END_OF_TEXT,
            "pad_token_id": PAD,
        },
        "generation_config.json": {"eos_token_id": [END_OF_TEXT, IM_END], "pad_token_id": PAD, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "eos_token": SPECIALS[0],
            "pad_token": SPECIALS[3],
            "additional_special_tokens": list(SPECIALS[1:3]),
        },
        "tokenizer.json": _tokenizer(),
    }


def _tokenizer() -> dict[str, object]:
    """A byte-level BPE without merges: token n is byte n, the specials follow. Any text survives the round trip."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [
        {
            "id": 256 + index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, content in enumerate(SPECIALS)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(_byte_symbols())},
            "merges": [],
        },
    }


def _byte_symbols() -> list[str]:
    """The visible stand-in of each byte. Source: GPT-2's byte-to-unicode table, which ByteLevel expects."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    replacements = iter(range(0x100, 0x200))
    return [chr(byte) if byte in kept else chr(next(replacements)) for byte in range(256)]
