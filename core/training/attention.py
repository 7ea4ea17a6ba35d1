"""Attention over packed sequences: no padding token is computed, and a prompt that several responses share, once.

On a GPU in half precision it is torch's variable-length kernel (FlashAttention). Everywhere else an exact form of it:
tokens are padded for the attention alone and everything around it stays packed.

Registered through Transformers' attention interface, so it serves every model whose attention is a function of query,
key, value, scale and window. Soft caps and attention sinks are refused: ignoring them would train another model.
"""

from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..errors import ModelError

PACKED = "moonshift_packed"
PLAIN = "sdpa"
_UNKNOWN = ("softcap", "s_aux", "position_bias")
_HALF = (torch.bfloat16, torch.float16)


@dataclass(slots=True, kw_only=True)
class Spans:
    """S runs of consecutive query tokens, in packed order, and the keys that each may see.

    The last query of a run sees all its keys, the one before all but the last, and so on: causal, aligned at the end.
    """

    query_starts: Tensor
    """`[S + 1]` int32, first query token of each run and the end"""
    key_starts: Tensor
    """`[S + 1]` int32, the same in `keys`"""
    keys: Tensor | None
    """`[M]` int64, packed positions of the keys of all runs; None: those of the queries themselves"""
    runs: tuple[tuple[int, int], ...]
    """how many queries and keys each run has, on the host"""
    longest_query: int
    longest_keys: int
    _padded: "_Padded | None" = field(default=None)

    def padded(self) -> "_Padded":
        """The same as indices into a padded block, made once for all layers."""
        if self._padded is None:
            self._padded = _Padded.of(self)
        return self._padded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Padded:
    queries: Tensor
    """`[S · Q]` int64, packed position of each place, 0 where there is none"""
    keys: Tensor
    """`[S · K]` int64"""
    sees: Tensor
    """`[S, 1, Q, K]` bool"""
    places: Tensor
    """`[N]` int64, place of each packed token in `queries`"""
    shape: tuple[int, int, int]
    """S, Q, K"""

    @staticmethod
    def of(spans: Spans) -> "_Padded":
        device = spans.query_starts.device
        query_starts, key_starts = spans.query_starts.long(), spans.key_starts.long()
        num_queries, num_keys = query_starts.diff(), key_starts.diff()
        row = torch.arange(spans.longest_query, device=device)
        column = torch.arange(spans.longest_keys, device=device)
        is_query = row < num_queries[:, None]
        is_key = column < num_keys[:, None]
        key_places = torch.where(is_key, key_starts[:-1, None] + column, 0)
        last_seen = row + (num_keys - num_queries)[:, None]
        sees = column <= last_seen[:, :, None]  # a place without a query sees key 0, so that it is no NaN
        return _Padded(
            queries=torch.where(is_query, query_starts[:-1, None] + row, 0).flatten(),
            keys=(key_places if spans.keys is None else spans.keys[key_places]).flatten(),
            sees=(sees & is_key[:, None, :])[:, None],
            places=is_query.flatten().nonzero().squeeze(1),
            shape=(len(num_queries), spans.longest_query, spans.longest_keys),
        )


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Switch all of a model's attention to `PACKED` or `PLAIN`; what runs is read at each forward pass."""
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)


def packed_attention(  # noqa: PLR0913 Transformers calls it so
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    spans: Spans | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """`query` `[1, H, N, D]`, `key` and `value` `[1, G, N, D]`; returns `[1, N, H, D]`.

    Without `spans` it is plain attention over a batch.

    Raises:
        ModelError: the model's attention has a term that this one lacks.
    """
    if spans is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    for name in _UNKNOWN:
        if options.get(name) is not None:
            raise ModelError(f"{type(module).__name__} attends with {name}, which packed training does not know.")
    queries, keys, values = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    window = None if sliding_window is None or sliding_window >= spans.longest_keys else sliding_window
    attend = _variable_length if queries.is_cuda and queries.dtype in _HALF else _exact
    return attend(queries, keys, values, spans, scaling, window).unsqueeze(0), None


def _variable_length(
    queries: Tensor, keys: Tensor, values: Tensor, spans: Spans, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # needs a build for CUDA

    grouped: dict[str, Any] = {"enable_gqa": queries.shape[1] != keys.shape[1]}
    if "enable_gqa" not in signature(varlen_attn).parameters:  # torch 2.11 groups heads without being asked
        grouped = {}
    if spans.keys is not None:
        keys, values = keys.index_select(0, spans.keys), values.index_select(0, spans.keys)
    out = varlen_attn(
        queries.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        spans.query_starts,
        spans.key_starts,
        spans.longest_query,
        spans.longest_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out


def _exact(
    queries: Tensor, keys: Tensor, values: Tensor, spans: Spans, scaling: float | None, window: int | None
) -> Tensor:
    padded = spans.padded()
    runs, longest_query, longest_keys = padded.shape
    sees = padded.sees if window is None else padded.sees & _within(spans, padded, window)
    out = scaled_dot_product_attention(
        queries.index_select(0, padded.queries).unflatten(0, (runs, longest_query)).transpose(1, 2),
        keys.index_select(0, padded.keys).unflatten(0, (runs, longest_keys)).transpose(1, 2),
        values.index_select(0, padded.keys).unflatten(0, (runs, longest_keys)).transpose(1, 2),
        attn_mask=sees,
        scale=scaling,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, padded.places)


def _within(spans: Spans, padded: _Padded, window: int) -> Tensor:
    """`[S, 1, Q, K]`: keys that are less than `window` before the query; places without a query keep key 0."""
    _, longest_query, longest_keys = padded.shape
    row = torch.arange(longest_query, device=padded.sees.device)[:, None]
    column = torch.arange(longest_keys, device=padded.sees.device)
    num_queries, num_keys = spans.query_starts.diff(), spans.key_starts.diff()
    last_seen = row + (num_keys - num_queries)[:, None, None]
    near = column > last_seen - window
    return (near | (row >= num_queries[:, None, None]))[:, None]


AttentionInterface.register(PACKED, packed_attention)
