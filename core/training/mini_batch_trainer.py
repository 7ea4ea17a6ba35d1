"""Gradient accumulation over mini-batches: what training the policy and training the critic have in common.

Invariant: an update depends on the batch, the weights and the optimizer state alone. The gradient does not depend on
how a mini-batch is cut into micro-batches, because every loss is normalised by counts of the whole mini-batch.
The model is touched through `named_parameters` and the forward call only: a sharded one (`parallel.py`) takes its
place, and each rank then makes its share of the passes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from ..batch import Batch, Ragged
from ..errors import NonFiniteError
from ..plan import TrainPlan
from .flops import ModelFlops
from .layout import TokenLayout
from .memory import MemoryLimit, Result
from .micro_batches import micro_batches, sample_lengths
from .optimizer import ModelOptimizer
from .parallel import Probe, device_of, end_passes, more_passes, ranks_of, whole_weights
from .schedule import learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The rows of one optimizer step and the counts that its loss is divided by."""

    rows: Tensor
    """`[M]` int64"""
    num_tokens: int
    """under the loss mask"""
    num_sequences: int
    index: int
    """of this mini-batch within the update, from 0 over all epochs"""


@dataclass(slots=True)
class _Totals:
    """Values of the optimizer steps of one update, by metric."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            self.values.setdefault(key, []).append(value)

    def reduced(self, summed: list[str]) -> dict[str, float]:
        """Means, but sums of the counters named."""
        means = {key: sum(values) / len(values) for key, values in self.values.items()}
        return means | {key: sum(self.values.get(key, [])) for key in summed}


class MiniBatchTrainer:
    """Owns a model's optimizer and takes its steps; a subclass computes one micro-batch's loss and gradient."""

    kind = "model"
    """`actor` or `critic`: the first part of its metrics' names"""

    def __init__(self, plan: TrainPlan, optimizer: ModelOptimizer, *, grad_clip: float, steps: int) -> None:
        self.model = model = optimizer.model
        self.root = model
        """what a pass calls: the model, or a module around it"""
        self.cut = plan
        self.optimizer = optimizer
        self.grad_clip = grad_clip
        self.steps = steps
        self.drop_last = False
        self.ranks = ranks_of(model)
        self.probe = None if self.ranks.alone else Probe(model)
        self.limit = MemoryLimit(self.kind, plan.micro_batch_size, plan.max_tokens, shared=not self.ranks.alone)
        self.optimizer_steps = 0
        self.version = 0
        self.flops: ModelFlops | None = None
        """for the metrics alone; a subclass that has it adds `perf/tflop/<kind>` to its micro-batches'"""

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters by name, tied ones once, in the model's order; whole, so every rank has to ask for all."""
        return whole_weights(self.model)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Take the optimizer steps of training step `step`; returns metrics averaged over them."""
        rate = learning_rate(self.optimizer.settings, step, self.steps)
        self.optimizer.set_rate(rate)
        totals = _Totals()
        for mini_batch in self._mini_batches(batch, step):
            totals.add(self._optimizer_step(batch, mini_batch, step))
        self.version = step
        counters = [f"{self.kind}/skipped_updates", f"{self.kind}/empty_batches"]
        counters += [f"perf/{work}/{self.kind}" for work in ("tflop", "tflop_unshared") if self.flops is not None]
        return totals.reduced(counters) | {
            f"{self.kind}/lr": rate,
            "training/dropped_samples": float(self._left_out(batch)),
            **self.limit.metrics(),
        }

    def _mini_batches(self, batch: Batch, step: int) -> Iterator[MiniBatch]:
        """The rows of each optimizer step, in order; a smaller last one is normalised by its own counts."""
        masks = batch.ragged("loss_mask")
        before = torch.cat([masks.values.new_zeros(1, dtype=torch.int64), masks.values.long().cumsum(0)])
        trained = before[masks.offsets[1:]] - before[masks.offsets[:-1]]
        used = torch.arange(len(batch) - self._left_out(batch))
        cuts = [rows for _ in range(self.cut.epochs) for rows in used.split(self.cut.samples_per_mini_batch)]
        for index, rows in enumerate(cuts):
            yield MiniBatch(
                rows=rows,
                num_tokens=int(trained[rows].sum()),
                num_sequences=int((trained[rows] > 0).sum()),
                index=index,
            )

    def _left_out(self, batch: Batch) -> int:
        """Samples after the last whole mini-batch, where they are to be left out."""
        return len(batch) % self.cut.samples_per_mini_batch if self.drop_last else 0

    def _optimizer_step(self, batch: Batch, mini_batch: MiniBatch, step: int) -> dict[str, float]:
        """Gradient accumulation over one mini-batch; no step on an empty batch or a gradient that is not finite."""
        skipped = {f"{self.kind}/skipped_updates": 0.0, f"{self.kind}/empty_batches": 0.0}
        if mini_batch.num_tokens == 0:
            return skipped | {f"{self.kind}/empty_batches": 1.0}
        metrics: dict[str, float] = {}
        try:
            metrics = self._within_memory(batch, mini_batch, step)
            norm = self.optimizer.clip(self.grad_clip)
        except NonFiniteError:
            norm = math.nan
            end_passes(self.root)
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            return metrics | skipped | {f"{self.kind}/grad_norm": norm, f"{self.kind}/skipped_updates": 1.0}
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer_steps += 1
        return metrics | skipped | {f"{self.kind}/grad_norm": norm}

    def _within_memory(self, batch: Batch, mini_batch: MiniBatch, step: int) -> dict[str, float]:
        """Accumulate the gradient; where the memory runs out, drop it and begin again with passes half as large."""

        def work(size: int, tokens: int | None) -> dict[str, float]:
            self._begin(batch, mini_batch, step)
            return self._accumulate(batch, mini_batch, size, tokens)

        self.optimizer.zero_grad()
        longest = int(sample_lengths(batch)[mini_batch.rows].max())
        metrics = self.limit.run(work, longest, self._give_up)
        if self.flops is not None:
            prompts, responses = (
                batch.ragged(name).lengths[mini_batch.rows] for name in ("prompt_ids", "response_ids")
            )
            metrics[f"perf/tflop_unshared/{self.kind}"] = self.flops.of_samples(prompts, responses) / 1e12
        return metrics

    def _give_up(self) -> None:
        """Drop what the passes of a mini-batch have left so far."""
        end_passes(self.root)
        self.optimizer.zero_grad()

    def _without_backward(
        self, model: nn.Module, limit: MemoryLimit, work: Callable[[int, int | None], Result], batch: Batch
    ) -> Result:
        """`work(samples, tokens)` in forward passes that fit the memory; `model` is in shards again afterwards."""
        found = limit.run(work, int(sample_lengths(batch).max()), partial(end_passes, model))
        end_passes(model)
        return found

    def _begin(self, batch: Batch, mini_batch: MiniBatch, step: int) -> None:
        """What is computed once over the whole mini-batch, before its first micro-batch."""

    def _accumulate(self, batch: Batch, mini_batch: MiniBatch, size: int, tokens: int | None) -> dict[str, float]:
        """Gradients of all micro-batches; metrics are shares that add up."""
        metrics: dict[str, float] = {}
        passes = self.ranks.share(micro_batches(batch, mini_batch.rows, size, tokens))
        for one in passes:
            more_passes(self.root, one is not passes[-1])
            found = self._pass(batch if one.counts else _blank(batch), one.rows, mini_batch)
            if not one.counts:
                continue
            for key, value in found.items():
                metrics[key] = metrics.get(key, 0.0) + value
        return self.ranks.sum(metrics)

    def _pass(self, batch: Batch, rows: Tensor, mini_batch: MiniBatch) -> dict[str, float]:
        """`_backward`; where it refuses its numbers, the other ranks still get this one's part of the pass."""
        try:
            return self._backward(batch, rows, mini_batch)
        except NonFiniteError:
            if self.probe is None:
                raise
            self.probe.give_up()
            return {}

    def _work(self, layout: TokenLayout) -> dict[str, float]:
        """What a micro-batch costs in 10^12 FLOP, as a metric that adds up."""
        return {} if self.flops is None else {f"perf/tflop/{self.kind}": self.flops.of_layout(layout) / 1e12}

    def _backward(self, batch: Batch, rows: Tensor, mini_batch: MiniBatch) -> dict[str, float]:
        """Loss and gradient of one micro-batch, as its share of the mini-batch."""
        raise NotImplementedError

    def _dense(self, batch: Batch, name: str, rows: Tensor, layout: TokenLayout) -> Tensor:
        """A ragged column of the given rows, padded to the layout's response width: `[B, T]`."""
        values = batch.select([name]).reorder(rows)
        return values.padded(name, width=layout.response_ids.shape[1])[0].to(self.device)


def _blank(batch: Batch) -> Batch:
    """The same with nothing to train on: a pass of it has no gradient and counts no token."""
    masks = batch.ragged("loss_mask")
    return batch.with_columns({"loss_mask": Ragged(torch.zeros_like(masks.values), masks.offsets)})
