"""Metrics of a step, under verl's names."""

from collections.abc import Sequence

import torch

from ..batch import Batch


def spread(name: str, values: torch.Tensor) -> dict[str, float]:
    """`name/mean`, `name/max` and `name/min` of a vector; nothing for an empty one."""
    if values.numel() == 0:
        return {}
    numbers = values.double()
    return {
        f"{name}/mean": float(numbers.mean()),
        f"{name}/max": float(numbers.max()),
        f"{name}/min": float(numbers.min()),
    }


def length_metrics(batch: Batch, max_response_length: int) -> dict[str, float]:
    """Prompt and response lengths in tokens; `clip_ratio` is the share cut off by the limit."""
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    reasons: Sequence[str] = batch.rows("finish_reason")
    clipped = sum(reason == "length" for reason in reasons) / max(1, len(reasons))
    return {
        **spread("response_length", responses.lengths),
        **spread("prompt_length", prompts.lengths),
        "response_length/clip_ratio": clipped,
        "response_length/total": float(responses.lengths.sum()),
    }


def mismatch(sampled: torch.Tensor, trained: torch.Tensor, entropy: torch.Tensor) -> dict[str, float]:
    """Entropy, and how far the inference engine's probabilities and log-probs (nats) are from the training engine's.

    All `[N]`, one value a response token: log-probs of both engines, and the training engine's entropies in nats.
    """
    if sampled.numel() == 0:
        return {}
    difference = (sampled.double().exp() - trained.double().exp()).abs()
    return {
        "actor/entropy": float(entropy.double().mean()),
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_log_probs_diff_mean": float((sampled.double() - trained.double()).abs().mean()),
    }
