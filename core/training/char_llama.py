"""A tiny Llama that reads characters, made from a seed: the model of the quickstart, with nothing to download.

Invariant: the same seed and settings give the same bytes, whatever the process drew from torch's generators before.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .char_llama_settings import CharLlamaSettings, config_values, read_settings

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1


def build_char_llama(out: Path, *, seed: int, settings: dict[str, Any]) -> None:
    """Write model and tokenizer into the folder `out`, in Hugging Face format, float32.

    Raises ModelError (see `read_settings`).
    """
    checked = read_settings(settings)
    tokenizer = _tokenizer(checked)
    config = LlamaConfig(**config_values(checked), bos_token_id=None, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
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
