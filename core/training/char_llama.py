"""A tiny Llama that reads characters, made from a seed: the model of the quickstart, with nothing to download.

Invariant: the same seed and settings give the same bytes, whatever the process drew from torch's generators before.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..errors import ModelError

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1


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


def build_char_llama(out: Path, *, seed: int, settings: dict[str, Any]) -> None:
    """Write model and tokenizer into the folder `out`, in Hugging Face format, float32.

    Raises ModelError (see `read_settings`).
    """
    checked = read_settings(settings)
    tokenizer = _tokenizer(checked)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=checked.hidden_size,
        intermediate_size=checked.intermediate_size or 4 * checked.hidden_size,
        num_hidden_layers=checked.num_hidden_layers,
        num_attention_heads=checked.num_attention_heads,
        num_key_value_heads=checked.num_key_value_heads or checked.num_attention_heads,
        max_position_embeddings=checked.max_position_embeddings,
        tie_word_embeddings=checked.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    # torch.manual_seed would also seed the GPU's generator, which the fork below does not restore
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model = LlamaForCausalLM(config)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _tokenizer(settings: CharLlamaSettings) -> PreTrainedTokenizerFast:
    """One token a character. A word-level model needs an unknown token: it is <pad>, which rendering never makes of
    known text and refuses (`rendering.encode_text`), so that no further token can be sampled."""
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, *settings.alphabet))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()  # without a decoder the tokens come back with spaces between them
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=PAD,
        model_max_length=settings.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
