"""Loss aggregation: from one loss a token to the one number that is differentiated.

The denominators are those of the global mini-batch and are passed in, so the values and gradients of its micro-batches
(and of its data-parallel ranks) sum to those of the whole, however it was split. Nothing here divides by a number of
micro-batches, and nobody may do so afterwards; an engine that averages gradients over ranks multiplies by their number.
`B` is the number of sequences, `T` the padded response width in tokens.
"""

import torch
from torch import Tensor

from ..errors import ConfigError
from .checks import check_number, check_tokens, lookup

LOSS_AGG_MODES: dict[str, str] = {
    "token-mean": "Σ loss / num_tokens",
    "token-sum": "Σ loss",
    "seq-mean-token-sum": "Σ of each sequence's sum / num_sequences",
    "seq-mean-token-sum-norm": "Σ of each sequence's sum / (num_sequences × scale_factor)",
    "seq-mean-token-mean": "Σ of each sequence's mean / num_sequences",
}
"""By the name in `actor.loss_agg_mode`: the formula, for people."""


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    num_tokens: int | float,
    num_sequences: int,
    scale_factor: float | None = None,
) -> Tensor:
    """Reduce `loss` `[B, T]` of one micro-batch to its share of the mini-batch's loss.

    `token-mean` is DAPO's (arXiv 2503.14476, eq. 8), `seq-mean-token-mean` the original GRPO's (arXiv 2402.03300,
    eq. 3), `seq-mean-token-sum-norm` Dr. GRPO's (arXiv 2503.20783, §3.2); formulas in `LOSS_AGG_MODES`.

    Example: token losses (1, 1), (3, 3), (0 × 6) give token-mean 8 / 10, seq-mean-token-sum 8 / 3,
    seq-mean-token-mean 4 / 3, and with `scale_factor=8` seq-mean-token-sum-norm 1 / 3.

    Args:
        loss: `[B, T]`, float32 or float64; what lies outside the mask is never read.
        mask: `[B, T]` bool.
        mode: a name in `LOSS_AGG_MODES`.
        num_tokens: tokens under the mask in the whole mini-batch, over all ranks.
        num_sequences: sequences in the whole mini-batch, over all ranks, without rows that only fill a batch up.
        scale_factor: tokens; the constant of `seq-mean-token-sum-norm`, such as the longest response allowed. It has
            no default there, because the padded width would change the loss with the split. Other modes ignore it.

    Returns:
        Scalar in the type of `loss`, summed in float64. Without a token under the mask it is 0 with gradient 0.

    Raises:
        ConfigError: unknown mode, or `scale_factor` is missing or not > 0.
        ValueError: wrong shape, type or device; a count that is negative, or 0 while the mask has tokens.
        NonFiniteInputError: a loss under the mask is NaN or infinite.
    """
    lookup("mode", mode, LOSS_AGG_MODES)
    check_tokens(mask, mask_name="mask", loss=loss)
    denominator = _denominator(mode, num_tokens=num_tokens, num_sequences=num_sequences, scale_factor=scale_factor)
    if denominator == 0:
        if bool(mask.any()):
            raise ValueError(
                f"num_tokens is {num_tokens} and num_sequences {num_sequences}, but mask {list(mask.shape)} has "
                f"{int(mask.sum())} tokens; {mode} needs the counts of the whole mini-batch."
            )
        denominator = 1.0

    sums_B = loss.masked_fill(~mask, 0.0).sum(dim=1, dtype=torch.float64)
    if mode == "seq-mean-token-mean":
        sums_B = sums_B / mask.sum(dim=1).clamp(min=1)
    return (sums_B.sum() / denominator).to(loss.dtype)


def _denominator(mode: str, *, num_tokens: float, num_sequences: int, scale_factor: float | None) -> float:
    check_number("num_tokens", num_tokens)
    check_number("num_sequences", num_sequences)
    if scale_factor is not None:
        check_number("scale_factor", scale_factor, more_than=0)
    if mode == "token-mean":
        return num_tokens
    if mode == "token-sum":
        return 1.0
    if mode == "seq-mean-token-sum-norm":
        if scale_factor is None:
            raise ConfigError(
                "scale_factor is None; seq-mean-token-sum-norm needs a constant > 0, such as the longest response "
                "allowed in tokens."
            )
        return num_sequences * scale_factor
    return num_sequences
