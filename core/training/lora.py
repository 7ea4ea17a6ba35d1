"""Low-rank adapters (LoRA, arXiv 2106.09685) put into a model by peft; the base weights are frozen and never changed.

Invariant: merging gives new tensors. A layer's weight W is served and exported as W + alpha / rank · B A, computed anew
each time from the W that was loaded, so that no number of syncs adds up (case W03).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..config.schema import ModelSection
from ..errors import CheckpointError, ConfigError
from .fingerprint import weights_sha256
from .parallel import gathered, ranks_of, sharded_like, whole

ADAPTER = "default"
"""peft's own name of the only adapter"""
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_BASE = ".base_layer."
_PREFIX = "base_model.model."
"""of names in peft's files"""


def add_adapter(model: PreTrainedModel, settings: ModelSection, seed: int) -> None:
    """Freeze a model and put a fresh adapter into it, in place; it changes nothing yet, since B begins at zero.

    A is drawn on the host from `seed` alone, so it is the same on every rank and device. It comes before `shard`.

    Raises:
        ConfigError: `target_modules` names no layer, or one that is no linear layer of the model's body.
    """
    from peft import inject_adapter_in_model

    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(_peft_config(settings), model, ADAPTER)
    except ValueError as error:
        raise ConfigError(
            f"actor_rollout_ref.model.target_modules={list(settings.target_modules)} cannot be adapted: {error}"
        ) from error
    layers = dict(_layers(model))
    outside = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    wrong = [name for name, layer in layers.items() if id(layer) in outside or not len(layer.lora_A)]
    if wrong:  # a tied head would be two matrices once it is merged
        raise ConfigError(
            f"actor_rollout_ref.model.target_modules covers {wrong[0]}, which is no linear layer of the model's body; "
            "embeddings and head stay as they are."
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in layers.values():
        for part in (layer.lora_A, layer.lora_B):
            part.requires_grad_(True)


def _peft_config(settings: ModelSection) -> Any:
    from peft import LoraConfig

    named = list(settings.target_modules)
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules="all-linear" if named == ["all-linear"] else named,
        exclude_modules=list(settings.exclude_modules) or None,
    )


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The base model's own numbers within: the reference, without a second copy of the weights.

    Only the layers' forward calls are redirected: peft's own switch would also freeze the adapter, and a shard that is
    first gathered while it is frozen would never have a gradient.
    """
    layers: list[Any] = [layer for _, layer in _layers(model)]
    for layer in layers:
        layer.forward = layer.base_layer.__call__
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters under the base model's names, each whole and with its adapter in it; the model is not changed.

    A layer at a time, tied ones once, in the model's order; without an adapter the model's own tensors. Where sharded,
    a collective for each, so every rank has to ask for all.
    """
    layers: dict[str, Any] = dict(_layers(model))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        owner = name.partition(_BASE)[0]
        value = whole(parameter)
        if owner in layers and name.endswith(f"{_BASE}weight"):
            value = _merged(value, layers[owner])
        yield name.replace(_BASE, "."), value


@torch.no_grad()
def _merged(weight: Tensor, layer: Any) -> Tensor:
    delta = whole(layer.lora_B[ADAPTER].weight) @ whole(layer.lora_A[ADAPTER].weight)
    return weight + layer.scaling[ADAPTER] * (delta.T if layer.fan_in_fan_out else delta)


def gathered_merged_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """`merged_weights` as a state to be saved, tied tensors under all their names; of shards on rank 0 alone."""
    state: dict[str, Tensor] = {}
    write = ranks_of(model).rank == 0
    for name, tensor in merged_weights(model):
        state[name] = tensor.detach().cpu() if write else tensor.new_empty(0)
    owners = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".lora_" not in name:
            state[name.replace(_BASE, ".")] = state[owners[id(parameter)].replace(_BASE, ".")]
    return state


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors under the names of peft's files, each as `gathered` gives it."""
    named = ((name, parameter) for name, parameter in model.named_parameters() if ".lora_" in name)
    return {_PREFIX + name.replace(f".{ADAPTER}.", "."): gathered(parameter.detach()) for name, parameter in named}


def save_adapter(folder: Path, state: dict[str, Tensor], settings: ModelSection, base_sha256: str) -> None:
    """Write `adapter_state` as a folder that peft loads over the base model, and which base that was."""
    folder.mkdir()
    _peft_config(settings).save_pretrained(folder)
    written = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
    save_file(written, folder / WEIGHTS, {"format": "pt", "base_sha256": base_sha256})


def load_adapter(model: PreTrainedModel, folder: Path, base_sha256: str) -> None:
    """Inverse of `save_adapter`, into an adapter of the same settings.

    Raises:
        CheckpointError: the adapter belongs to another base model, or to another adapter.
    """
    with safe_open(folder / WEIGHTS, framework="pt") as opened:
        expected = (opened.metadata() or {}).get("base_sha256")
    if expected != base_sha256:
        raise CheckpointError(
            f"The adapter in {folder} was trained over weights of SHA-256 {expected}, and the initial policy that was "
            f"loaded has {base_sha256}. Bring back the model that actor_rollout_ref.model.path named at the start, or "
            f"begin a new run from {folder.parent / 'model'}, where the adapter is merged in."
        )
    state = load_file(folder / WEIGHTS)
    names = {_PREFIX + name.replace(f".{ADAPTER}.", "."): p for name, p in model.named_parameters() if ".lora_" in name}
    if names.keys() != state.keys():
        raise CheckpointError(f"The adapter in {folder} has other layers: {sorted(names.keys() ^ state.keys())[:3]}.")
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(sharded_like(state[name], parameter))


def base_sha256(model: nn.Module) -> str:
    """Which base an adapter is trained over; to be asked for before the adapter is there."""
    return weights_sha256(model.named_parameters())


def has_adapter(model: nn.Module) -> bool:
    """Whether `add_adapter` was there."""
    return next(_layers(model), None) is not None


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers with an adapter by name, peft's `lora.Linear`."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "base_layer"))
