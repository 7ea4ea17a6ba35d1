"""Whitening: masked values brought to mean 0 and variance 1, once for the whole batch.

The statistics are those of every token handed in, so whitening a part is not the same as a part of the whitened: it
comes before a batch is split. `B` is the number of sequences, `T` the padded response width in tokens.
"""

import torch
from torch import Tensor

from .checks import check_tokens

_VARIANCE_EPSILON = 1e-8


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """`(value - mean) · rsqrt(variance + 1e-8)` over the masked tokens, as PPO's advantages are (arXiv 2006.05990).

    The variance is unbiased (ddof 1), epsilon stands inside the root, the statistics are float64. Defined for few
    tokens too: none gives 0 everywhere; one has no variance and stays as it is; two or more that are all equal give
    exactly 0 (the test is max == min, as for groups).

    Example: 1, 2, 3 under the mask give -1, 0, 1, whatever stands beside them.

    Args:
        values: `[B, T]`, float32 or float64; what lies outside the mask is never read.
        mask: `[B, T]` bool.

    Returns:
        `[B, T]` in the type of `values`, 0 outside the mask, without gradient.

    Raises:
        ValueError: wrong shape, type or device.
        NonFiniteInputError: a value under the mask is NaN or infinite.
    """
    check_tokens(mask, mask_name="mask", values=values)
    known = values.detach().double().masked_fill(~mask, 0.0)
    count = mask.sum(dtype=torch.float64)
    mean = known.sum() / count.clamp(min=1)
    centred = (known - mean).masked_fill(~mask, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    whitened = centred * torch.rsqrt(variance + _VARIANCE_EPSILON)
    whitened = torch.where(_all_equal(known, mask), 0.0, whitened)
    return torch.where(count == 1, known, whitened).to(values.dtype)


def _all_equal(values: Tensor, mask: Tensor) -> Tensor:
    if not values.numel():  # a batch without a row has no largest value
        return torch.ones((), dtype=torch.bool, device=values.device)
    largest = values.masked_fill(~mask, -torch.inf).max()
    return largest == values.masked_fill(~mask, torch.inf).min()
