"""Drawing inside vLLM's sampler, by its public interface for logits processors.

vLLM's own log-probs are taken before the temperature (raw) or after top-k and top-p (processed); training needs those
between the two. Its seeded draws loop over the rows in Python. So a processor draws here: it leaves the drawn id as the
only finite logit, which vLLM then takes greedily, and keeps the log-prob on the device until the rollout is over.
"""

from importlib import import_module
from typing import Any

import numpy as np
import torch

from moonshift.core.types import SamplingParams

from .drawing import draw, uniforms

SAMPLE = "moonshift_sample"
"""Key of a request's `extra_args`: its sample's index in the rollout."""
MAX_ELEMENTS = 2**25
"""Logits drawn from at once: bounds the float64 copies to some 300 MB."""


class DrawState:
    """What the processor of one engine needs in one rollout, and what it leaves behind."""

    def __init__(self, vocab_limit: int) -> None:
        self.vocab_limit = vocab_limit
        self.params: SamplingParams | None = None
        self.log_probs = torch.zeros(0)
        """`[samples, max_new_tokens + 1]` float32 on the engine's device; the last column is scratch: a sample that
        ended may be drawn once more before the scheduler knows"""
        self._uniforms: np.ndarray | None = None
        self._zero = torch.zeros(())

    def begin(self, params: SamplingParams, seeds: list[int], device: torch.device) -> None:
        self.params = params
        self.log_probs = torch.full((len(seeds), params.max_new_tokens + 1), torch.nan, device=device)
        self._zero = torch.zeros((), device=device)
        self._uniforms = None
        if params.temperature > 0 and seeds:
            self._uniforms = np.stack([uniforms(seed, params.max_new_tokens + 1) for seed in seeds])

    def end(self) -> torch.Tensor:
        """The log-probs on the host, and nothing kept."""
        values = self.log_probs.cpu()
        self.params, self._uniforms = None, None
        self.log_probs = torch.zeros(0)
        return values

    def draw(self, logits: torch.Tensor, rows: list[int], samples: list[int], positions: list[int]) -> torch.Tensor:
        """`logits` `[R, V]` with one finite value in each of `rows`: token `positions[i]` of sample `samples[i]`."""
        assert self.params is not None
        capped = np.minimum(positions, self.params.max_new_tokens)
        where = _to_device(np.stack([rows, samples, capped]), logits.device)
        randoms = None
        if self._uniforms is not None:
            randoms = _to_device(self._uniforms[samples, capped], logits.device)
        size = max(1, MAX_ELEMENTS // self.vocab_limit)
        for start in range(0, len(rows), size):
            part = where[:, start : start + size]
            # mostly every row is drawn for: then a view of the logits will do
            chosen = slice(start, start + size) if len(rows) == len(logits) else part[0]
            known = logits[chosen, : self.vocab_limit]
            ids, values = draw(known, None if randoms is None else randoms[start : start + size], self.params)
            self.log_probs[part[1], part[2]] = values
            logits[chosen] = -torch.inf
            # a number would be copied from the host, and the host would wait for all that the device has to do
            logits.index_put_((part[0], ids), self._zero)
        return logits


def _to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class DrawingProcessor:
    """What vLLM's `LogitsProcessor` has to do: knows which row of its batch is which sample, and how far each is."""

    state: DrawState
    """set by `processor_class`"""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[int, list[int]]] = {}
        """row → sample, and the list to which vLLM adds the sample's ids"""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the rows that vLLM took out, put in and moved, in that order (its `BatchUpdate`, or None)."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, output_ids in batch_update.added:
            self._rows.pop(row, None)
            if params.extra_args is not None and SAMPLE in params.extra_args:
                self._rows[row] = (params.extra_args[SAMPLE], output_ids)
        for source, target, direction in batch_update.moved:
            first, second = self._rows.pop(source, None), self._rows.pop(target, None)
            if first is not None:
                self._rows[target] = first
            if second is not None and direction.name == "SWAP":
                self._rows[source] = second

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._rows or self.state.params is None:
            return logits
        rows = sorted(self._rows)
        found = [self._rows[row] for row in rows]
        return self.state.draw(logits, rows, [sample for sample, _ in found], [len(ids) for _, ids in found])


def processor_class(state: DrawState) -> type:
    """A class of vLLM's logits processors that draw for `state`; vLLM makes the object."""
    base = import_module("vllm.v1.sample.logits_processor").LogitsProcessor
    return type("MoonshiftProcessor", (DrawingProcessor, base), {"state": state})
