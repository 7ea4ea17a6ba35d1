"""What every engine is asked for and gives back: checked requests, drawn samples, a way to stop.

Invariant: whatever ends a rollout early leaves an engine that serves the next one.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from moonshift.core.batch import Batch, Ragged
from moonshift.core.errors import DataError, NonFiniteError, StageError
from moonshift.core.types import SamplingParams

OnSample = Callable[[int, list[int]], None]
"""Called with a sample's index (0 … B·n - 1) and its response ids, in the order in which samples finish."""

_ROUNDING = 1e-3
"""how far above 0 a log-prob may come by rounding"""


@dataclass(slots=True)
class Drawn:
    """One response while it grows."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str = "length"

    def add(self, token: int, log_prob: float, stop: bool) -> None:
        self.ids.append(token)
        self.log_probs.append(log_prob)
        if stop:
            self.finish_reason = "stop"


class Stopper:
    """Ends a rollout from another thread, or when its time is over."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._deadline: float | None = None

    def begin(self, timeout_s: float | None) -> None:
        self._cancelled.clear()
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def cancel(self) -> None:
        self._cancelled.set()

    def check(self, done: int, total: int) -> None:
        """Raises StageError where the rollout was cancelled or takes too long; called between two tokens."""
        if self._cancelled.is_set():
            raise StageError(f"The rollout was cancelled with {done} of {total} samples finished.")
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise StageError(
                f"The rollout took longer than its time limit, with {done} of {total} samples finished. Raise "
                "recovery.stage_timeout_s, or lower data.train_batch_size or data.max_response_length."
            )


def check_request(
    prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int], max_model_len: int | None
) -> None:
    """Raises DataError for what no engine can generate from: an empty or too long prompt, a wrong number of seeds."""
    if len(seeds) != len(prompts) * params.n:
        raise DataError(
            f"{len(seeds)} seeds were given for {len(prompts)} prompts of {params.n} samples; each sample has its own."
        )
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise DataError(f"Prompt {index} has no token; there is nothing to go on from. Leave it out.")
        if max_model_len is not None and len(prompt) + params.max_new_tokens > max_model_len:
            raise DataError(
                f"Prompt {index} of {len(prompt)} tokens and a response of {params.max_new_tokens} do not fit into the "
                f"{max_model_len} tokens of the engine. Lower data.max_prompt_length or data.max_response_length, or "
                "raise actor_rollout_ref.rollout.max_model_len up to what the model can do."
            )


def to_batch(prompts: list[list[int]], n: int, drawn: Sequence[Drawn]) -> Batch:
    """B·n rows in prompt order: `prompt_ids, response_ids, rollout_log_probs` (ragged) and `finish_reason`.

    Raises NonFiniteError where the engine gave a token no log-prob, or one that is none (case G04): a 0 in its place
    would train on a wrong ratio without a word.
    """
    for sample, one in enumerate(drawn):
        _check_log_probs(sample, one)
    return Batch(
        {
            "prompt_ids": Ragged.from_list([prompt for prompt in prompts for _ in range(n)], torch.int64),
            "response_ids": Ragged.from_list([sample.ids for sample in drawn], torch.int64),
            "rollout_log_probs": Ragged.from_list([sample.log_probs for sample in drawn], torch.float32),
            "finish_reason": [sample.finish_reason for sample in drawn],
        }
    )


def _check_log_probs(sample: int, drawn: Drawn) -> None:
    if len(drawn.log_probs) != len(drawn.ids):
        raise NonFiniteError(
            f"The engine gave {len(drawn.log_probs)} log-probs for the {len(drawn.ids)} tokens of sample {sample}."
        )
    for token, value in enumerate(drawn.log_probs):
        if value is None or not -math.inf < value < _ROUNDING:
            raise NonFiniteError(
                f"The engine gave log-prob {value} for token {token} (id {drawn.ids[token]}) of sample {sample}. "
                "Nothing can be trained on it: the weights may hold NaN, or the engine's dtype is too narrow for them "
                "(actor_rollout_ref.rollout.dtype)."
            )
