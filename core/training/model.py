"""A model as the user names it, brought into place as a Hugging Face folder, and loaded from there.

Invariant: a folder that `resolve_model` or `import_model` hands out was checked and is whole.
"""

import hashlib
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..errors import ModelError
from .char_llama import build_char_llama
from .char_llama_settings import read_settings
from .gguf import convert_gguf
from .model_folder import (
    LOAD_FAULTS,
    MODEL_FILES,
    build_once,
    check_folder,
    check_tokenizer_files,
    copy_files,
    no_progress_bars,
    publish,
    read_json,
    refuse_code,
    weight_files,
)
from .packages import packaged_gguf

CHAR_LLAMA = "builtin:char-llama"
PACKAGE = "package:"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(
    path: str, *, override_config: dict[str, Any], seed: int, cache: Path, trust_remote_code: bool = False
) -> Path:
    """The checked folder of the model that `model.path` names; what must be made is made once, below `cache`.

    A Hugging Face folder is taken as it is; a GGUF file is converted; `builtin:char-llama` is built from `seed` and
    `override_config`. For all others a non-empty `override_config` gives a copy with those values in config.json
    (weights linked where the file system can).

    Raises:
        ModelError: nothing there, or it cannot be used; the message says which file or key and what to do.
        StorageError, OSError: the cache cannot be written.
    """
    if path == CHAR_LLAMA:
        settings = {"settings": override_config, "seed": seed}
        read_settings(override_config)
        name = f"char-llama-{_digest(json.dumps(settings, sort_keys=True).encode())}"
        return build_once(cache / name, partial(build_char_llama, seed=seed, settings=override_config))
    folder = _locate(path, cache, trust_remote_code)
    check_folder(folder, trust_remote_code=trust_remote_code)
    return _overridden(folder, override_config, cache, trust_remote_code) if override_config else folder


def import_model(source: str, out: Path, *, trust_remote_code: bool = False) -> Path:
    """Write the model at `source` (folder, GGUF file, package: or hub name) as a Hugging Face folder to `out`.

    Raises ModelError when the source cannot be used or `out` is not empty; nothing is left at `out` then.
    """
    out = out.expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists and is not empty; name a new folder.")
    gguf = _gguf_source(source)
    if source == CHAR_LLAMA:
        build = partial(build_char_llama, seed=0, settings={})
    elif gguf is not None:
        build = partial(convert_gguf, gguf)
    else:
        build = partial(_copy_model, _hub_or_folder(source, trust_remote_code), trust_remote_code=trust_remote_code)

    def build_and_check(folder: Path) -> None:
        build(folder)
        check_folder(folder, trust_remote_code=trust_remote_code)
        load_tokenizer(folder, trust_remote_code=trust_remote_code)

    publish(out, build_and_check)
    return out


def load_model(
    folder: Path,
    *,
    device: str | torch.device,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The causal language model in `folder`, in eval mode, every dropout at zero even in training mode.

    Raises ModelError for a folder that cannot be used, broken or missing weights, or an unknown architecture.
    """
    check_folder(folder, trust_remote_code=trust_remote_code)
    try:
        with no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
            model, report = loaded
    except LOAD_FAULTS as error:
        raise ModelError(f"Cannot load the model in {folder}: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would draw them at random
        raise ModelError(
            f"The weights in {folder} lack {len(missing)} of the model's parameters, the first {missing[0]}; they "
            "belong to another model or are not whole."
        )
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model.to(device).eval()


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`. Raises ModelError when there is none or it cannot be read."""
    refuse_code(folder, trust_remote_code)
    check_tokenizer_files(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except LOAD_FAULTS as error:
        raise ModelError(f"Cannot load the tokenizer in {folder}: {error}") from error
    if not len(tokenizer):
        raise ModelError(f"The tokenizer in {folder} has no tokens; its files are not whole.")
    return tokenizer


def stop_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[int, ...]:
    """Every id that ends a response: of generation_config.json, config.json and the tokenizer, each once (case G01).

    Example: generation_config `[32007, 32001]`, config 32000, tokenizer 32000: (32007, 32001, 32000).

    Raises ModelError when none is declared, since no response would ever end.
    """
    declared: list[object] = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            declared += value if isinstance(value, list) else [value]
    declared.append(tokenizer.eos_token_id)
    found = dict.fromkeys(value for value in declared if isinstance(value, int) and value >= 0)
    if not found:
        raise ModelError(f"The model in {folder} declares no stop token; set eos_token_id in generation_config.json.")
    return tuple(found)


def _gguf_source(path: str) -> Path | None:
    if path.startswith(PACKAGE):
        return packaged_gguf(path.removeprefix(PACKAGE))
    file = Path(path).expanduser().absolute()
    if file.suffix != ".gguf" or file.is_dir():
        return None
    if not file.is_file():
        raise ModelError(f"There is no file {file} (model.path={path}).")
    return file


def _locate(path: str, cache: Path, trust_remote_code: bool) -> Path:
    gguf = _gguf_source(path)
    if gguf is None:
        return _hub_or_folder(path, trust_remote_code)
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:12]
    return build_once(cache / f"{_safe(gguf.stem)}-{digest}", partial(convert_gguf, gguf))


def _hub_or_folder(path: str, trust_remote_code: bool) -> Path:
    folder = Path(path).expanduser().absolute()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{folder} is neither a model folder nor a .gguf file.")
    if not HUB_NAME.fullmatch(path):
        raise ModelError(f"There is no model at {folder} (model.path={path}).")
    return _from_hub(path, trust_remote_code)


def _from_hub(name: str, trust_remote_code: bool) -> Path:
    """The folder of a hub model in the local hub cache; downloaded only where the user left the hub open."""
    patterns = [*MODEL_FILES, *(["*.py"] if trust_remote_code else [])]
    try:
        folder = Path(snapshot_download(name, local_files_only=True, allow_patterns=patterns))
        if _is_whole(folder):
            return folder
    except (OSError, ValueError):
        pass  # not in the local cache
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ModelError(
            f"model.path={name}: there is no such folder here, and the hub model {name} is not (whole) in the local "
            f"hub cache. Where there is a network, run `HF_HUB_OFFLINE=0 moonshift model import {name} OUT`, then set "
            "model.path to the folder OUT."
        )
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path={name}: no such folder here, and it cannot be downloaded: {error}") from error


def _is_whole(folder: Path) -> bool:
    try:
        weight_files(folder)
        check_tokenizer_files(folder)
    except ModelError:
        return False
    return (folder / "config.json").is_file()


def _overridden(folder: Path, values: dict[str, Any], cache: Path, trust_remote_code: bool) -> Path:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    unknown = sorted(values.keys() - config.to_dict().keys())
    if unknown:
        raise ModelError(
            f"model.override_config names {', '.join(unknown)}, which the config of {folder} ({config.model_type}) "
            "does not have."
        )
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]
    key = json.dumps([str(folder), stats, values], sort_keys=True, default=str).encode()

    def build(target: Path) -> None:
        copy_files(folder, target, trust_remote_code)
        merged = json.dumps(read_json(folder / "config.json") | values, indent=2) + "\n"
        (target / "config.json").unlink()  # it may be linked to the original
        (target / "config.json").write_text(merged, "utf-8")
        check_folder(target, trust_remote_code=trust_remote_code)

    return build_once(cache / f"{_safe(folder.name)}-{_digest(key)}", build)


def _copy_model(source: Path, target: Path, *, trust_remote_code: bool) -> None:
    """Copy a folder's model files; weights that are there as .bin only are written anew as safetensors."""
    if not (source / "config.json").is_file():
        raise ModelError(f"{source} is no Hugging Face model folder: it has no config.json.")
    refuse_code(source, trust_remote_code)
    copy_files(source, target, trust_remote_code, link=False)
    if any(source.glob("*.safetensors")) or not any(source.glob("*.bin")):
        return
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype="auto", local_files_only=True, trust_remote_code=trust_remote_code
        )
    except LOAD_FAULTS as error:
        raise ModelError(f"Cannot load the model in {source}: {error}") from error
    model.save_pretrained(target)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name) or "model"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
