"""Token ids kept from one start to the next: the same rows and the same tokenizer are encoded once.

Invariant: a file's name is the digest of all that its ids follow from, and a file that is not whole counts for nothing.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from moonshift.core.datasets.token_rows import TokenRows
from moonshift.core.training.rendering import Renderer, RenderFault

from .files import flush, storage_errors
from .home import home

FORM = 1
"""raised when what is stored, or how prompts are rendered, changes"""
KEPT = 16
"""files that are kept, those last used"""
READS_CLOCK = "strftime_now"
"""A template that calls it renders another text tomorrow."""

Rendered = list[RenderFault | None]


def key(renderer: Renderer, content: str) -> str | None:
    """Name of the file for rows whose digest is `content`; None where their ids must not be kept.

    The rows' digest covers file bytes, keys and system prompt as far as they change a turn; ours adds vocabulary,
    template and the versions of what renders.
    """
    tokenizer = renderer.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    template = json.dumps(tokenizer.chat_template) if renderer.with_template else ""
    if backend is None or READS_CLOCK in template:
        return None
    parts = [
        str(FORM),
        *(version(package) for package in ("transformers", "tokenizers", "jinja2")),
        type(tokenizer).__name__,
        json.dumps(_settings(tokenizer), sort_keys=True),
        hashlib.sha256(backend.to_str().encode()).hexdigest(),
        template,
        content,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def load(name: str) -> tuple[TokenRows, Rendered] | None:
    """Ids and faults, row by row; None where there are none, or the file was damaged."""
    file = _folder() / f"{name}.safetensors"
    try:
        with safe_open(file, framework="numpy") as opened:
            about = opened.metadata() or {}
            flat, offsets = opened.get_tensor("ids"), opened.get_tensor("offsets")
        if about.get("sha256") != _digest(flat, offsets, about.get("faults", "")):
            return None
        faults = json.loads(about["faults"])
        os.utime(file)
    except (OSError, SafetensorError):
        return None
    rows = TokenRows(flat, offsets)
    found: Rendered = [None] * len(rows)
    for place, uid, where, kind, reason in faults:
        found[place] = RenderFault(uid=uid, place=where, kind=kind, reason=reason)
    return rows, found


def store(name: str, rows: TokenRows, faults: Sequence[RenderFault | None]) -> None:
    """Keep them: written beside the place, flushed, renamed into it; then the files last used are kept.

    Raises StorageError.
    """
    told = json.dumps(
        [[place, fault.uid, fault.place, fault.kind, fault.reason] for place, fault in enumerate(faults) if fault]
    )
    folder = _folder()
    file = folder / f"{name}.safetensors"
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    with storage_errors(file):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            about = {"faults": told, "sha256": _digest(rows.flat, rows.offsets, told)}
            save_file({"ids": rows.flat, "offsets": rows.offsets}, temporary, metadata=about)
            flush(temporary)
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
        flush(folder)
        _retire(folder)


def _retire(folder: Path) -> None:
    found = sorted(folder.glob("*.safetensors"), key=lambda file: (file.stat().st_mtime, file.name), reverse=True)
    for file in found[KEPT:]:
        file.unlink(missing_ok=True)


def _settings(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Special tokens and what else the template may read."""
    return {name: str(value) for name, value in tokenizer.special_tokens_map.items()} | {
        "added": str(
            sorted((index, token.content, token.special) for index, token in tokenizer.added_tokens_decoder.items())
        )
    }


def _digest(flat: np.ndarray, offsets: np.ndarray, faults: str) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(flat).data)
    digest.update(np.ascontiguousarray(offsets).data)
    digest.update(faults.encode())
    return digest.hexdigest()


def _folder() -> Path:
    return home() / "tokens"
