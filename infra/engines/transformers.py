"""A sampling loop on Transformers with a KV cache: the deterministic engine, and the default on the CPU.

Invariant: a sample depends on its prompt, the weights and its own seed, not on a stream shared with other samples.
"""

from collections.abc import Iterable

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from moonshift.core.batch import Batch, Ragged
from moonshift.core.training.attention import PLAIN, use_attention
from moonshift.core.types import SamplingParams

from .drawing import draw, uniforms
from .requests import Drawn, OnSample, Stopper, check_request, to_batch


class TransformersEngine:
    """Generates with a Transformers model, which may be the very model that is trained (colocated)."""

    def __init__(self, model: PreTrainedModel, *, vocab_limit: int, max_sequences: int) -> None:
        self._model = model
        self._vocab_limit = vocab_limit
        self._max_sequences = max_sequences
        self._version: int | None = None
        self._stopper = Stopper()

    @property
    def version(self) -> int | None:
        """Policy version whose weights are served."""
        return self._version

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take over weights by name; a tensor that is already the model's own storage is not copied."""
        own = dict(self._model.named_parameters())
        for name, tensor in weights:
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        self._version = version

    def budget(self, max_sequences: int) -> None:
        """Bound the sequences generated at once; same samples, longer queue."""
        self._max_sequences = max_sequences

    def cancel(self) -> None:
        """End a running `generate` from another thread; it raises StageError."""
        self._stopper.cancel()

    def sleep(self) -> None:
        """Give cached blocks back; the KV cache lives only during `generate`."""
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Nothing to take back: the cache is made anew by each `generate`."""

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        seeds: list[int],
        on_sample: OnSample | None = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """Draw `params.n` responses for each of B prompts; see `RolloutEngine.generate`."""
        check_request(prompts, params, seeds, getattr(self._model.config, "max_position_embeddings", None))
        self._stopper.begin(timeout_s)
        use_attention(self._model, PLAIN)
        drawn = [Drawn() for _ in seeds]
        was_training = self._model.training
        self._model.eval()
        try:
            for start in range(0, len(drawn), self._max_sequences):
                indices = range(start, min(start + self._max_sequences, len(drawn)))
                rows = _Rows(indices, seeds, params, self._model.device)
                self._generate_rows(prompts, rows, drawn, on_sample)
        finally:
            self._model.train(was_training)
        return to_batch(prompts, params.n, drawn)

    def _generate_rows(
        self, prompts: list[list[int]], rows: "_Rows", drawn: list[Drawn], on_sample: OnSample | None
    ) -> None:
        """Generate the samples of `rows`; those of one prompt share its prefill."""
        device, params = self._model.device, rows.params
        distinct = sorted(set(rows.owners))
        logits, cache, attention, positions = self._prefill([prompts[owner] for owner in distinct])
        which = torch.tensor([distinct.index(owner) for owner in rows.owners], device=device)
        cache.batch_select_indices(which)
        logits, attention, positions = logits[which], attention[which], positions[which]
        stops = torch.tensor(params.stop_ids, dtype=torch.int64, device=device)
        active = torch.arange(len(rows.owners), device=device)  # row of the cache → row of `rows`
        for index in range(params.max_new_tokens):
            self._stopper.check(rows.start, len(drawn))
            ids, log_probs = draw(logits[:, : self._vocab_limit].float(), rows.randoms[active, index], params)
            stopped = torch.isin(ids, stops)
            last = index + 1 == params.max_new_tokens
            for row, token, value, stop in zip(
                active.tolist(), ids.tolist(), log_probs.tolist(), stopped.tolist(), strict=True
            ):
                sample = rows.start + row
                drawn[sample].add(token, value, stop)
                if on_sample is not None and (stop or last):
                    on_sample(sample, drawn[sample].ids)
            running = (~stopped).nonzero().squeeze(1)
            if len(running) == 0 or last:
                break
            if len(running) < len(active):
                cache.batch_select_indices(running)
                active, ids = active[running], ids[running]
                attention, positions = attention[running], positions[running]
            positions = positions + 1
            attention = torch.cat([attention, attention.new_ones(len(active), 1)], dim=1)
            logits = self._model(
                input_ids=ids[:, None],
                attention_mask=attention,
                position_ids=positions[:, None],
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]

    def _prefill(self, prompts: list[list[int]]) -> tuple[torch.Tensor, DynamicCache, torch.Tensor, torch.Tensor]:
        """Last logits `[P, V]`, cache, attention mask `[P, W]` and last position `[P]` of left-padded prompts."""
        ids, mask = Batch({"ids": Ragged.from_list(prompts, torch.int64)}).padded("ids", side="left")
        ids, attention = ids.to(self._model.device), mask.to(self._model.device).long()
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        logits = self._model(
            input_ids=ids,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits, cache, attention, positions[:, -1]


class _Rows:
    """Samples that are generated at once: whose prompts they have, and their random numbers."""

    def __init__(self, indices: range, seeds: list[int], params: SamplingParams, device: torch.device) -> None:
        self.start = indices.start
        self.params = params
        self.owners = [index // params.n for index in indices]
        """prompt of each sample"""
        numbers = np.stack([uniforms(seeds[index], params.max_new_tokens) for index in indices])
        self.randoms = torch.from_numpy(numbers).to(device)
        """`[R, max_new_tokens]` float64"""
