"""The cut of rows into forward passes, by count or by a budget of tokens."""

from collections.abc import Iterator

import torch

from ..batch import Batch
from ..plan.packing import cut_in_order


def sample_lengths(batch: Batch) -> torch.Tensor:
    """Tokens of prompt and response, `[B]` int64."""
    return batch.ragged("prompt_ids").lengths + batch.ragged("response_ids").lengths


def micro_batches(
    batch: Batch, rows: torch.Tensor, micro_batch_size: int, max_tokens: int | None
) -> Iterator[torch.Tensor]:
    """`rows` (`[M]` int64, of `batch`) in order, in passes of `micro_batch_size` rows; with `max_tokens` in passes of
    nearly equal size that compute at most that many tokens, a prompt that consecutive rows share counted once.

    Raises:
        PlanError: when one sample is longer than `max_tokens`.
    """
    if max_tokens is None:
        yield from rows.split(micro_batch_size)
        return
    prompts = [prompt.tolist() for prompt in batch.ragged("prompt_ids").take(rows).rows()]
    whole = sample_lengths(batch)[rows].tolist()
    added = [
        length - len(prompt) if index and prompt == prompts[index - 1] else length
        for index, (prompt, length) in enumerate(zip(prompts, whole, strict=True))
    ]
    for start, stop in cut_in_order(whole, added, max_tokens):
        yield rows[start:stop]
