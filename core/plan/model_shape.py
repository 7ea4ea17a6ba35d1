"""A model's architecture from its config file, without loading it or importing a model library."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .sizes import ModelShape


def read_shape(folder: Path) -> ModelShape | None:
    """The shape of the model in a Hugging Face folder; None where its config does not say."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return shape_of(settings, parameters=_counted(folder))


def shape_of(settings: Mapping[str, Any], parameters: int | None = None) -> ModelShape | None:
    """The shape that a config's values describe, under Transformers' names; None where they do not tell.

    `parameters`: their number where it was counted; else computed for a gated decoder (Llama, Qwen, Mistral, Gemma).
    """
    inner = settings.get("text_config")
    settings = {**settings, **inner} if isinstance(inner, Mapping) else settings
    try:
        hidden = int(settings["hidden_size"])
        layers = int(settings["num_hidden_layers"])
        heads = int(settings["num_attention_heads"])
        vocab = int(settings["vocab_size"])
        intermediate = int(settings.get("intermediate_size") or 4 * hidden)
        kv_heads = int(settings.get("num_key_value_heads") or heads)
        head_dim = int(settings.get("head_dim") or hidden // heads)
        positions = int(settings.get("max_position_embeddings") or 2**31)
    except (KeyError, TypeError, ValueError):
        return None
    experts = int(settings.get("num_local_experts") or settings.get("num_experts") or 1)
    if parameters is None:
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        block = attention + 3 * hidden * intermediate * experts + 2 * hidden
        tied = bool(settings.get("tie_word_embeddings", False))
        parameters = layers * block + vocab * hidden * (1 if tied else 2) + hidden
    return ModelShape(
        parameters=parameters,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        attention_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_positions=positions,
    )


def _counted(folder: Path) -> int | None:
    """Parameters, from the headers of the folder's safetensors files; None without any.

    A header is JSON behind its length in 8 little-endian bytes; the tensors themselves are not read.
    """
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                (size,) = struct.unpack("<Q", opened.read(8))
                header = json.loads(opened.read(min(size, 2**26)))
            total += sum(_elements(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
        except (OSError, ValueError, struct.error, KeyError, TypeError):
            return None
    return total or None


def _elements(shape: list[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
