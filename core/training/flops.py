"""Floating-point operations of training, counted from what is computed, and the peaks that devices are sold with.

A multiplication and an addition are two operations. As in MFU's definition (arXiv 2204.02311, appendix B) only what the
model's mathematics needs is counted: nothing that is computed again to save memory, and no norm, softmax or optimizer.
Unlike there, attention is counted by the pairs of query and key that see each other, not as if it were not causal.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .layout import TokenLayout

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_KINDS = {"full_attention", "sliding_attention"}
_TERA = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """What decides the FLOP of one model's passes; weights are those that multiply tokens, a look-up is none.

    A token costs 2 FLOP a weight forward, 2 for its input's gradient, and 2 for the gradient of a weight that is
    trained (arXiv 2001.08361, section 2.1); a pair of query and key costs 2 · 2 · heads · head_dim forward (scores and
    values) a layer, and twice that backward.
    """

    body: int
    """weights that every token passes"""
    trained_body: int
    """of these, those that have a gradient"""
    head: int
    """weights that every scored token passes"""
    trained_head: int
    attention_width: int
    """heads · head_dim"""
    windows: tuple[int | None, ...]
    """of each layer, how many keys a query sees at the most; None: all before it"""

    @classmethod
    def of(cls, model: nn.Module, config: Any, head: nn.Module | None) -> "ModelFlops | None":
        """Count a model's weights; `head`: its layer after the last hidden state. None where attention is not known
        from the config: latent, linear or chunked attention, state spaces."""
        heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
        layers = getattr(config, "num_hidden_layers", None)
        kinds = set(getattr(config, "layer_types", None) or _KINDS)
        latent = getattr(config, "kv_lora_rank", None)
        if not heads or not hidden or not layers or latent or not kinds <= _KINDS:
            return None
        of_head = {id(weight) for weight in head.parameters()} if head is not None else set[int]()
        look_ups = {
            id(weight) for part in model.modules() if isinstance(part, nn.Embedding) for weight in part.parameters()
        }
        weights = [weight for weight in model.parameters() if weight.ndim > 1]
        body = [weight for weight in weights if id(weight) not in look_ups | of_head]
        after = [weight for weight in weights if id(weight) in of_head]
        return cls(
            body=_used(body, config),
            trained_body=_used([weight for weight in body if weight.requires_grad], config),
            head=_used(after, config),
            trained_head=_used([weight for weight in after if weight.requires_grad], config),
            attention_width=heads * (getattr(config, "head_dim", None) or hidden // heads),
            windows=_windows(config, layers),
        )

    def training(self, tokens: int, scored: int, runs: Iterable[tuple[int, int]]) -> int:
        """FLOP of a forward and a backward pass over packed tokens, of which `scored` go through the head.

        `runs`: queries and keys of each run of attention, causal and aligned at the end as in `Spans`.
        """
        weights = tokens * (4 * self.body + 2 * self.trained_body) + scored * (4 * self.head + 2 * self.trained_head)
        cut = list(runs)
        seen = {window: sum(_pairs(*run, window) for run in cut) for window in set(self.windows)}
        return weights + 12 * self.attention_width * sum(seen[window] for window in self.windows)

    def of_layout(self, layout: TokenLayout) -> int:
        """FLOP of training on a micro-batch as it is computed: a prompt that its responses share counts once."""
        return self.training(len(layout.input_ids), len(layout.predicted_from), layout.spans.runs)

    def of_samples(self, prompts: Tensor, responses: Tensor) -> int:
        """FLOP of training on samples that share nothing; their lengths in tokens, `[B]` int64 each."""
        lengths = [length for length in (prompts + responses - 1).tolist() if length > 0]
        return self.training(sum(lengths), int(responses.sum()), [(length, length) for length in lengths])


def _used(weights: list[nn.Parameter], config: Any) -> int:
    """Weights that a token passes: all, but of stacked experts (`[E, …]`) those that it is sent to."""
    experts = next((count for name in _EXPERTS if (count := getattr(config, name, None))), 1)
    chosen = getattr(config, "num_experts_per_tok", None) or experts
    return sum(
        weight.numel() * chosen // experts if weight.ndim > 2 and weight.shape[0] == experts else weight.numel()
        for weight in weights
    )


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return (window,) * layers


def _pairs(queries: int, keys: int, window: int | None) -> int:
    """Pairs that see each other: the last query sees all keys, the one before all but the last, within the window."""
    first = keys - queries + 1
    whole = keys if window is None else max(first - 1, min(keys, window))  # up to here a query sees all before it
    below = (first + whole) * (whole - first + 1) // 2
    return below + (keys - whole) * (window or 0)


_PEAKS: tuple[tuple[str, float, float], ...] = (
    # device name (nvidia-smi's), bfloat16 and TF32 tensor cores in 10^12 FLOP/s, dense, by NVIDIA's data sheets
    (r"NVIDIA H200|NVIDIA H100 80GB HBM3", 989.5, 494.5),
    (r"NVIDIA H200 NVL|NVIDIA H100 NVL", 835.5, 417.5),
    (r"NVIDIA H100 PCIe", 756.0, 378.0),
    (r"NVIDIA A100-(SXM4|PCIE)-[48]0GB|NVIDIA A100 80GB PCIe", 312.0, 156.0),
    (r"NVIDIA L40S", 362.05, 183.0),
    (r"NVIDIA L4", 121.0, 60.0),
)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s that the maker states for dense matrices, float32 ones in TF32; None for a device or type not known."""
    for pattern, half, single in _PEAKS:
        if re.fullmatch(pattern, device_name):
            known = {torch.bfloat16: half, torch.float16: half, torch.float32: single}
            return known[dtype] * _TERA if dtype in known else None
    return None


def utilisation(metrics: dict[str, float], kind: str, seconds: float, peak: float) -> dict[str, float]:
    """`perf/mfu/<kind>` from the counted `perf/tflop/<kind>`, and the same with every sample's prompt counted again
    (`perf/mfu_unshared/<kind>`, what verl counts); `peak`: FLOP/s of all devices together."""
    names = {"perf/tflop": "perf/mfu", "perf/tflop_unshared": "perf/mfu_unshared"}
    return {
        f"{share}/{kind}": metrics[f"{work}/{kind}"] * _TERA / (seconds * peak)
        for work, share in names.items()
        if f"{work}/{kind}" in metrics
    }
