"""What `builtin:char-llama` may be set to; read without torch, so that a plan can ask for the model's shape.

Invariant: settings that pass here can be built.
"""

from dataclasses import dataclass, fields
from typing import Any

from ..errors import ModelError

SPECIAL_TOKENS = 2
"""<pad> and <eos>, beside one token a character"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CharLlamaSettings:
    """What `model.override_config` may set for `builtin:char-llama`. The defaults give 1,052,160 parameters."""

    alphabet: str = "0123456789+-*=() "
    """characters the tokenizer knows, each one token"""
    hidden_size: int = 128
    intermediate_size: int | None = None
    """none: 4 x hidden_size"""
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    """none: num_attention_heads"""
    max_position_embeddings: int = 64
    """tokens, prompt and response together"""
    tie_word_embeddings: bool = True


def read_settings(settings: dict[str, Any]) -> CharLlamaSettings:
    """Checked settings. Raises ModelError for an unknown name, a wrong kind of value or sizes that do not fit."""
    known = {field.name for field in fields(CharLlamaSettings)}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ModelError(
            f"builtin:char-llama has no setting {', '.join(unknown)}; model.override_config may set "
            f"{', '.join(sorted(known))}."
        )
    for name, value in settings.items():
        _check_value(name, value)
    checked = CharLlamaSettings(**settings)
    heads, key_value_heads = checked.num_attention_heads, checked.num_key_value_heads or checked.num_attention_heads
    if checked.hidden_size % heads or (checked.hidden_size // heads) % 2:
        raise ModelError(
            f"model.override_config: hidden_size {checked.hidden_size} over num_attention_heads {heads} must give an "
            "even whole number (rotary position embeddings turn pairs)."
        )
    if heads % key_value_heads:
        raise ModelError(
            f"model.override_config: num_attention_heads {heads} is no multiple of num_key_value_heads "
            f"{key_value_heads}."
        )
    return checked


def _check_value(name: str, value: Any) -> None:
    if name == "alphabet":
        if not isinstance(value, str) or not value or len(set(value)) != len(value):
            raise ModelError(
                f"model.override_config.alphabet is {value!r}; it must be text, each character once "
                "(in YAML, put it in quotes)."
            )
    elif name == "tie_word_embeddings":
        if not isinstance(value, bool):
            raise ModelError(f"model.override_config.{name} is {value!r}; it must be true or false.")
    elif value is None and name in ("intermediate_size", "num_key_value_heads"):
        return
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"model.override_config.{name} is {value!r}; it must be a whole number of at least 1.")


def config_values(settings: CharLlamaSettings) -> dict[str, Any]:
    """The sizes as Hugging Face names them; `vocab_size` counts the special tokens."""
    return {
        "vocab_size": SPECIAL_TOKENS + len(settings.alphabet),
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size or 4 * settings.hidden_size,
        "num_hidden_layers": settings.num_hidden_layers,
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": settings.num_key_value_heads or settings.num_attention_heads,
        "max_position_embeddings": settings.max_position_embeddings,
        "tie_word_embeddings": settings.tie_word_embeddings,
    }
