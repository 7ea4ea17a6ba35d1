"""Fused kernels in place of a model's many small ones."""

from importlib import import_module

import torch
from transformers import PreTrainedModel

from ..errors import ModelError


def use_liger(model: PreTrainedModel, device: torch.device) -> None:
    """Put Liger's Triton kernels (arXiv 2410.10989) in the place of norms, rotary embedding and gated feed-forward.

    Numbers differ by rounding. The head stays as it is: log-probs are computed in parts (`log_probs.py`).

    Raises:
        ModelError: there is no GPU, Liger is not installed, or it does not know the model's type.
    """
    key = "actor_rollout_ref.model.use_liger"
    if device.type != "cuda":
        raise ModelError(f"{key} needs a GPU, and the model is on the {device.type}; set it to false.")
    try:
        liger = import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise ModelError(
            f"{key} needs liger-kernel, which is not installed here; install it or set it to false."
        ) from error
    if model.config.model_type not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ModelError(f"Liger has no kernels for models of type {model.config.model_type}; set {key} to false.")
    liger._apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
