"""A sampling loop on Transformers with a KV cache: the deterministic engine, and the default on the CPU.

Invariant: a sample depends on its prompt, the weights and its own seed, not on a stream shared with other samples.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from moonshift.core.batch import Batch, Ragged
from moonshift.core.training.attention import PLAIN, use_attention
from moonshift.core.types import SamplingParams


class TransformersEngine:
    """Generates with a Transformers model, which may be the very model that is trained (colocated)."""

    def __init__(self, model: PreTrainedModel, *, vocab_limit: int, max_sequences: int) -> None:
        self._model = model
        self._vocab_limit = vocab_limit
        self._max_sequences = max_sequences
        self._version = 0

    @property
    def version(self) -> int:
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
        on_sample: Callable[[int, list[int]], None] | None = None,
    ) -> Batch:
        """Draw `params.n` responses for each of B prompts; `seeds` has one value a response, `[B * n]`;
        `on_sample(row, ids)` is told of each response as it is whole.

        Returns B·n rows in prompt order: ragged `prompt_ids`, `response_ids` (the stop token included),
        `rollout_log_probs`, and the text column `finish_reason` (stop | length).
        """
        owners = [index for index in range(len(prompts)) for _ in range(params.n)]
        uniforms = np.stack([_uniforms(seed, params.max_new_tokens) for seed in seeds])
        use_attention(self._model, PLAIN)
        was_training = self._model.training
        self._model.eval()
        drawn: list[_Drawn] = []
        for start in range(0, len(owners), self._max_sequences):
            rows = slice(start, start + self._max_sequences)
            told = _shifted(on_sample, start)
            drawn += self._generate_rows(prompts, owners[rows], uniforms[rows], params, told)
        self._model.train(was_training)
        return Batch(
            {
                "prompt_ids": Ragged.from_list([prompts[owner] for owner in owners], torch.int64),
                "response_ids": Ragged.from_list([sample.ids for sample in drawn], torch.int64),
                "rollout_log_probs": Ragged.from_list([sample.log_probs for sample in drawn], torch.float32),
                "finish_reason": [sample.finish_reason for sample in drawn],
            }
        )

    def _generate_rows(
        self,
        prompts: list[list[int]],
        owners: list[int],
        uniforms: np.ndarray,
        params: SamplingParams,
        on_sample: Callable[[int, list[int]], None],
    ) -> "list[_Drawn]":
        """Generate one row per entry of `owners`; rows of one prompt share its prefill."""
        device = self._model.device
        distinct = sorted(set(owners))
        logits, cache, attention, positions = self._prefill([prompts[owner] for owner in distinct])
        which = torch.tensor([distinct.index(owner) for owner in owners], device=device)
        cache.batch_select_indices(which)
        logits, attention, positions = logits[which], attention[which], positions[which]
        randoms = torch.from_numpy(uniforms).to(device)
        stops = torch.tensor(params.stop_ids, dtype=torch.int64, device=device)
        samples = [_Drawn() for _ in owners]
        active = torch.arange(len(owners), device=device)  # row of the cache → sample
        for index in range(params.max_new_tokens):
            ids, log_probs = _sample(logits[:, : self._vocab_limit].float(), randoms[active, index], params)
            stopped = torch.isin(ids, stops)
            for sample, token, value, stop in zip(
                active.tolist(), ids.tolist(), log_probs.tolist(), stopped.tolist(), strict=True
            ):
                samples[sample].add(token, value, stop)
            at_end = index + 1 == params.max_new_tokens
            for sample in (active if at_end else active[stopped]).tolist():
                on_sample(sample, samples[sample].ids)
            running = (~stopped).nonzero().squeeze(1)
            if len(running) == 0 or at_end:
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
        return samples

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


def _shifted(on_sample: Callable[[int, list[int]], None] | None, start: int) -> Callable[[int, list[int]], None]:
    """Tells of the rows of a part of the batch that begins at `start`."""

    def told(row: int, ids: list[int]) -> None:
        if on_sample is not None:
            on_sample(start + row, ids)

    return told


class _Drawn:
    """One response while it grows."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.finish_reason = "length"

    def add(self, token: int, log_prob: float, stop: bool) -> None:
        self.ids.append(token)
        self.log_probs.append(log_prob)
        if stop:
            self.finish_reason = "stop"


def _uniforms(seed: int, count: int) -> np.ndarray:
    """The sample's own random numbers in [0, 1), counter based: position t needs no earlier draw."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def _sample(logits: torch.Tensor, randoms: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `[R]` and log-probs `[R]` by inverse transform of one uniform number a row.

    The log-prob is that of softmax(logits / temperature) before top-k and top-p cut it: what training computes too.
    """
    if params.temperature == 0:
        log_probs = torch.log_softmax(logits, dim=-1)
        ids = log_probs.argmax(dim=-1)
        return ids, log_probs.gather(1, ids[:, None]).squeeze(1)
    log_probs = torch.log_softmax(logits / params.temperature, dim=-1)
    probabilities = _truncate(log_probs.exp().double(), params)  # float64: 50,000 terms are summed
    cumulative = probabilities.cumsum(dim=-1)
    targets = randoms[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
    return ids, log_probs.gather(1, ids[:, None]).squeeze(1)


def _truncate(probabilities: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Set to 0 what top-k and top-p leave out; not renormalised."""
    if params.top_k > 0 and params.top_k < probabilities.shape[1]:
        smallest = probabilities.topk(params.top_k, dim=-1).values[:, -1:]
        probabilities = torch.where(probabilities >= smallest, probabilities, 0.0)
    if params.top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        kept = before < params.top_p * ordered.sum(dim=-1, keepdim=True)
        probabilities = torch.zeros_like(probabilities).scatter(1, order, torch.where(kept, ordered, 0.0))
    return probabilities
