"""Prompts and responses of one micro-batch, one behind the other: the form in which a model computes them.

A prompt that consecutive rows share, as those of a group do, stands there once, and each of its responses sees it as if
it stood before it alone: same positions, same keys. A response's last token is left out: it predicts nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import Ragged
from ..errors import DataError
from .attention import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayout:
    """N packed tokens of B rows, with R response tokens in all."""

    input_ids: Tensor
    """`[N]` int64"""
    position_ids: Tensor
    """`[N]` int64, from 0 at each prompt's first token"""
    spans: Spans
    predicted_from: Tensor
    """`[R]` int64, for each response token, rows in order, the packed token before it"""
    response_ids: Tensor
    """`[B, T]` int64, padded on the right"""
    response_mask: Tensor
    """`[B, T]` bool, from lengths and never from ids"""

    def dense(self, values: Tensor) -> Tensor:
        """`[R]` values, one a response token, as `[B, T]`, 0 outside the mask."""
        return values.new_zeros(self.response_mask.shape).masked_scatter(self.response_mask, values)


def lay_out(prompts: Ragged, responses: Ragged, rows: Tensor, device: torch.device) -> TokenLayout:
    """Lay out the given rows (`[B]` int64) of ragged prompts and responses.

    Raises:
        DataError: a prompt has no token, so that nothing predicts the first one of its response.
    """
    prompts, responses = prompts.take(rows), responses.take(rows)
    if not bool((prompts.lengths > 0).all()):
        raise DataError(f"The prompt of row {int(rows[prompts.lengths == 0][0])} has no token.")
    ids, mask = responses.padded(max(1, int(responses.lengths.max())), "right", 0)
    packer = _Packer()
    texts = [each.tolist() for each in prompts.rows()]
    bodies = [each.tolist() for each in responses.rows()]
    row = 0
    while row < len(texts):
        end = next((later for later in range(row + 1, len(texts)) if texts[later] != texts[row]), len(texts))
        packer.add(texts[row], bodies[row:end])
        row = end
    return TokenLayout(
        input_ids=torch.tensor(packer.ids, device=device),
        position_ids=torch.tensor(packer.positions, device=device),
        spans=packer.spans(device),
        predicted_from=torch.tensor(packer.predicted_from, dtype=torch.int64, device=device),
        response_ids=ids.to(device),
        response_mask=mask.to(device),
    )


class _Packer:
    """Collects prompts, each with its responses."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.predicted_from: list[int] = []
        self._runs: list[tuple[int, list[range]]] = []
        """of each run, how many queries, and which packed tokens are its keys"""

    def add(self, prompt: list[int], responses: list[list[int]]) -> None:
        start = len(self.ids)
        self._append(prompt, 0)
        shared = range(start, len(self.ids))
        alone = len(responses) == 1
        if not alone:
            self._runs.append((len(prompt), [shared]))
        for response in responses:
            if not response:
                continue
            own = range(len(self.ids), len(self.ids) + len(response) - 1)
            self._append(response[:-1], len(prompt))
            self.predicted_from += [shared[-1], *own]
            if own and not alone:
                self._runs.append((len(own), [shared, own]))
        if alone:
            whole = range(start, len(self.ids))
            self._runs.append((len(whole), [whole]))

    def _append(self, ids: list[int], position: int) -> None:
        self.ids += ids
        self.positions += range(position, position + len(ids))

    def spans(self, device: torch.device) -> Spans:
        queries = [count for count, _ in self._runs]
        keys = [sum(map(len, parts)) for _, parts in self._runs]
        is_shared = any(len(parts) > 1 for _, parts in self._runs)
        places = torch.cat([torch.arange(part.start, part.stop) for _, parts in self._runs for part in parts])
        return Spans(
            query_starts=_starts(queries).to(device),
            key_starts=_starts(keys).to(device),
            keys=places.to(device) if is_shared else None,
            runs=tuple(zip(queries, keys, strict=True)),
            longest_query=max(queries),
            longest_keys=max(keys),
        )


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
