"""How a token is drawn from logits: one uniform number a token, the same in every engine.

Invariant: number t of a sample depends on its seed alone, so neither its batch nor its engine changes what is drawn
from equal logits.
"""

import numpy as np
import torch

from moonshift.core.types import SamplingParams

BLOCK = 256
"""Ids summed first on their own: a scan over a whole vocabulary is slow on a GPU, a sum is not."""


def uniforms(seed: int, count: int) -> np.ndarray:
    """The sample's own random numbers in [0, 1), `[count]` float64, counter based (Philox)."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def draw(
    logits: torch.Tensor, randoms: torch.Tensor | None, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `[R]` and log-probs `[R]` float32 by inverse transform of one uniform number a row.

    `logits`: `[R, V]` float32, of the ids that may be drawn and no others. `randoms`: `[R]` float64, unused where the
    temperature is 0. The log-prob is that of softmax(logits / temperature) before top-k and top-p cut it: what
    training computes too. At temperature 0 it is that of softmax(logits).
    """
    if randoms is None or params.temperature == 0:
        log_probs = torch.log_softmax(logits, dim=-1)
        ids = log_probs.argmax(dim=-1)
    else:
        log_probs = torch.log_softmax(logits / params.temperature, dim=-1)
        ids = inverse_transform(truncate(log_probs.exp().double(), params), randoms)  # float64: many terms are summed
    return ids, log_probs.gather(1, ids[:, None]).squeeze(1)


def inverse_transform(weights: torch.Tensor, randoms: torch.Tensor) -> torch.Tensor:
    """First id of each row whose cumulated weight exceeds `randoms` of the row's sum; `[R, V]`, `[R]` float64 → `[R]`.

    An id of weight 0 is never chosen.
    """
    rows, width = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -width % BLOCK)).view(rows, -1, BLOCK)
    sums = padded.sum(dim=-1)
    ends = sums.cumsum(dim=-1)
    targets = randoms[:, None] * ends[:, -1:]
    block = _first_above(ends, targets, sums)
    inside = padded.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
    rest = (targets - (ends.gather(1, block) - sums.gather(1, block))).clamp(min=0)  # below 0 by rounding alone
    return (block * BLOCK + _first_above(inside.cumsum(dim=-1), rest, inside)).squeeze(1)


def _first_above(ends: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Per row `[R, 1]`: the first place whose end exceeds the target, or, by rounding, the last place with weight."""
    place = torch.searchsorted(ends, targets, right=True)
    places = torch.arange(ends.shape[1], device=ends.device)
    last = (places * (weights > 0)).amax(dim=-1, keepdim=True)  # `where` with a number makes the host wait for a GPU
    return torch.minimum(place, last)


def truncate(probabilities: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Set to 0 what top-k and top-p leave out; not renormalised."""
    if params.top_k > 0 and params.top_k < probabilities.shape[1]:
        smallest = probabilities.topk(params.top_k, dim=-1).values[:, -1:]
        probabilities = probabilities * (probabilities >= smallest)
    if params.top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        kept = before < params.top_p * ordered.sum(dim=-1, keepdim=True)
        probabilities = torch.zeros_like(probabilities).scatter(1, order, ordered * kept)
    return probabilities
