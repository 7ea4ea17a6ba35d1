"""A Hugging Face model folder as files: checked, copied, and published whole or not at all.

Invariant: a published folder was built in a temporary folder beside its place, flushed to disk and renamed.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.utils import logging as transformers_logging

from ..errors import ModelError, StorageError

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 1800.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# what transformers raises for files that are missing, cut short, of a wrong kind, or of an unknown architecture
LOAD_FAULTS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)


def check_folder(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Raises ModelError unless config, weights (headers, not values) and tokenizer of a causal model are there."""
    if not folder.is_dir():
        raise ModelError(f"There is no model folder {folder}.")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is no Hugging Face model folder: it has no config.json.")
    refuse_code(folder, trust_remote_code)
    check_tokenizer_files(folder)
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"The weights {file} cannot be read ({error}); download or copy them again.") from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except LOAD_FAULTS as error:
        raise ModelError(f"Cannot use {folder / 'config.json'}: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not trust_remote_code:
        raise ModelError(f"The model in {folder} ({config.model_type}) is no causal language model; name one that is.")


def weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise ModelError(f"{index} has no weight_map; download or copy it again.")
        names = sorted(set(shards.values()))
    else:
        names = ["model.safetensors"]
    files = [folder / name for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent and any(folder.glob("*.bin")):
        raise ModelError(f"{folder} has its weights as .bin only; run `moonshift model import {folder} OUT` once.")
    if absent:
        raise ModelError(f"{folder} lacks its weights: {', '.join(absent[:3])} not found.")
    return files


def check_tokenizer_files(folder: Path) -> None:
    present = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        raise ModelError(f"{folder} has no tokenizer (looked for {', '.join(TOKENIZER_FILES)}).")
    # the tokenizers library raises a bare Exception for a file of a wrong shape
    if present[0].name == "tokenizer.json" and not isinstance(read_json(present[0]).get("model"), dict):
        raise ModelError(f"{present[0]} describes no tokenizer (no `model` in it); download or copy it again.")


def refuse_code(folder: Path, trust_remote_code: bool) -> None:
    """A model's own Python runs only where the user allows it (case S04)."""
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file() or not read_json(folder / name).get("auto_map"):
            continue
        if not trust_remote_code:
            raise ModelError(
                f"{folder / name} asks to run Python code that comes with the model (auto_map). Nothing was "
                "run; if you trust it, set actor_rollout_ref.model.trust_remote_code=true."
            )
        logger.warning("%s runs Python code that comes with the model (trust_remote_code)", folder / name)


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a {type(value).__name__}, not a JSON object.")
    return value


def copy_files(source: Path, target: Path, trust_remote_code: bool, link: bool = True) -> None:
    patterns = [*MODEL_FILES, *(["*.py"] if trust_remote_code else [])]
    for file in sorted({file for pattern in patterns for file in source.glob(pattern) if file.is_file()}):
        if link and file.suffix == ".safetensors":
            try:
                os.link(file.resolve(), target / file.name)
                continue
            except OSError:  # another file system, or one without links
                pass
        shutil.copyfile(file, target / file.name)


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """`target`, built by the first of all processes that ask for it."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(target.parent / f".{target.name}.lock", timeout=LOCK_TIMEOUT_S)
    try:
        with lock:
            if not target.is_dir():
                for leftover in target.parent.glob(f".{target.name}.*.partial"):  # of a process that was killed
                    shutil.rmtree(leftover)
                publish(target, build)
    except filelock.Timeout as error:
        raise ModelError(
            f"Another process has been making {target} for {LOCK_TIMEOUT_S:.0f} s; stop it and start again."
        ) from error
    return target


def publish(target: Path, build: Callable[[Path], None]) -> None:
    """Build beside the target, flush, rename; nothing is left of a build that failed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial_folder = target.parent / f".{target.name}.{os.getpid()}.partial"
    partial_folder.mkdir()
    try:
        with no_progress_bars():
            build(partial_folder)
        for place in (*partial_folder.rglob("*"), partial_folder):
            _flush(place)
        os.rename(partial_folder, target)
        _flush(target.parent)
    except SafetensorError as error:  # the library's own name for a full disk
        raise StorageError(f"Cannot write the weights below {target.parent}: {error}") from error
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def _flush(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws bars over the caller's own display."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
