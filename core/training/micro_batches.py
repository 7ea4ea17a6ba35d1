"""The cut of rows into forward passes, by count or by a budget of tokens."""

from collections.abc import Iterator

import torch

from ..batch import Batch
from ..plan.packing import cut_sorted


def sample_lengths(batch: Batch) -> torch.Tensor:
    """Tokens of prompt and response, `[B]` int64."""
    return batch.ragged("prompt_ids").lengths + batch.ragged("response_ids").lengths


def micro_batches(
    rows: torch.Tensor, lengths: torch.Tensor, micro_batch_size: int, max_tokens: int | None
) -> Iterator[torch.Tensor]:
    """`rows` (`[M]` int64, indices into `lengths` `[B]`) in passes of `micro_batch_size` rows, rows of similar length
    together so that little is padding; with `max_tokens` in passes whose padded size is at most that many tokens.

    Raises:
        PlanError: when one sample is longer than `max_tokens`.
    """
    if max_tokens is None:
        yield from rows[torch.argsort(lengths[rows], stable=True)].split(micro_batch_size)
        return
    for chosen in cut_sorted(lengths[rows].tolist(), max_tokens):
        yield rows[torch.tensor(chosen)]
