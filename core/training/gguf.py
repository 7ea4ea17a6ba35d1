"""GGUF files (the quantised one-file format of llama.cpp) turned into Hugging Face folders that can be trained.

Invariant: the folder is dense float32 and says nothing of quantisation; tokenizer and chat template are the file's own.
"""

import importlib.util
import struct
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from ..errors import ModelError
from .packages import INSTALL

# what transformers and gguf raise for a file that is cut short, of an unknown architecture or not a GGUF file
GGUF_FAULTS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    ImportError,
    EOFError,
    struct.error,
)


def check_gguf(source: Path) -> None:
    """Raises ModelError when the file is no GGUF file or the packages that read one are missing."""
    try:
        with source.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ModelError(f"Cannot read {source}: {error.strerror or error}.") from error
    if magic != b"GGUF":
        raise ModelError(f"{source} is no GGUF file: it begins with {magic!r}, not b'GGUF'; download it again.")
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(
            f"Reading {source.name} needs the package {' and '.join(missing)}; {INSTALL} {' '.join(missing)}."
        )


def convert_gguf(source: Path, out: Path) -> None:
    """Write `source` as a Hugging Face folder into `out` (float32: 4 bytes a parameter).

    Raises ModelError for a file that cannot be read, an architecture transformers does not know, or missing weights.
    """
    check_gguf(source)
    try:
        # a bar of its own, which transformers' switch for bars does not reach, would run over the caller's display
        with redirect_stderr(StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.parent,
                gguf_file=source.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
                output_loading_info=True,
            )
        model, report = loaded
    except GGUF_FAULTS as error:
        raise ModelError(f"Cannot convert {source}: {error}. Is the file whole, and its architecture known?") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{source} lacks {len(missing)} of the model's weights, the first {missing[0]}; it is not whole."
        )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are dense now; loaders would look for packed ones
    _align_special_tokens(tokenizer, model.config)
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _align_special_tokens(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Give the tokenizer the special tokens that the file declares by id; transformers 5.17 mixes up bos and eos."""
    for kind in ("bos", "eos", "pad"):
        declared = getattr(config, f"{kind}_token_id", None)
        if isinstance(declared, int) and 0 <= declared < len(tokenizer):
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(declared))
