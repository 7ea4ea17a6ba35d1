"""What happens when the memory runs out: passes are cut smaller, and the same work is done again.

The result is the same but for the order of additions: every loss is normalised over the whole mini-batch, and every
sample has its own seed. How far a run had to go is reported with its metrics, so that the next attempt begins there.
"""

import gc
import re
from collections.abc import Callable
from typing import TypeVar

import torch

from ..errors import MemoryLimitError, WorkerLostError

Result = TypeVar("Result")
_SAID = re.compile(r"out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED")
_KEYS = {
    "actor": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu (or ppo_max_token_len_per_gpu)",
    "critic": "critic.ppo_micro_batch_size_per_gpu (or ppo_max_token_len_per_gpu)",
    "log_prob": "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu (or log_prob_max_token_len_per_gpu)",
    "rollout": "actor_rollout_ref.rollout.max_num_seqs",
}


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: the GPU's, or the host's by Python's or torch's allocator."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(_SAID.search(str(error)))


def free_memory() -> None:
    """Give back what nobody uses any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class MemoryLimit:
    """The size of one kind of pass, and how often it was halved."""

    def __init__(self, what: str, size: int, tokens: int | None = None, *, shared: bool = False) -> None:
        self.what = what
        """actor | critic | log_prob | rollout"""
        self._size, self._tokens = size, tokens
        self.shared = shared
        """other ranks make these passes too, and wait for this one where it stopped: it cannot begin again alone"""
        self.divisor = 1

    @property
    def size(self) -> int:
        """Samples a pass."""
        return max(1, self._size // self.divisor)

    def tokens(self, longest: int) -> int | None:
        """Tokens a pass, never less than the longest sample has; None where passes are counted in samples."""
        return None if self._tokens is None else max(longest, self._tokens // self.divisor)

    def halve(self, longest: int) -> bool:
        """Half the samples or tokens from now on; false where a pass holds one sample already."""
        current = self._size if self._tokens is None else self._tokens
        if current // self.divisor <= (1 if self._tokens is None else longest):
            return False
        self.divisor *= 2
        return True

    def metrics(self) -> dict[str, float]:
        """`perf/memory_divisor/<what>`, where anything was halved."""
        return {f"perf/memory_divisor/{self.what}": float(self.divisor)} if self.divisor > 1 else {}

    def run(self, work: Callable[[int, int | None], Result], longest: int, undo: Callable[[], None]) -> Result:
        """`work(samples, tokens)`, again with half as much while the memory runs out.

        `longest`: tokens of the longest sample. `undo` drops what a failed try left behind.

        Raises:
            MemoryLimitError: when one sample alone is too much, naming its size and the keys to change.
            WorkerLostError: where ranks share the passes; they have to begin again together, at this `divisor`.
        """
        while True:
            try:
                return work(self.size, self.tokens(longest))
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                undo()
                error.__traceback__ = None  # its frames hold the tensors of the failed try
                free_memory()
                if not self.halve(longest):
                    raise MemoryLimitError(
                        f"The memory ran out ({self.what}) with a pass of one sample of {longest} tokens: "
                        f"[1, {longest}]. {_KEYS[self.what]} cannot be lowered further: lower "
                        "data.max_response_length or data.max_prompt_length, or take a smaller model or more memory. "
                        f"{error}"
                    ) from None
                if self.shared:
                    raise WorkerLostError(
                        f"The memory of this rank ran out ({self.what}); all ranks begin again with passes "
                        f"{self.divisor} times smaller. {error}"
                    ) from None


def once_more(what: str, work: Callable[[], Result]) -> Result:
    """`work`, and once again after memory was freed, for work that has no size to halve.

    Raises:
        MemoryLimitError: when the memory runs out twice.
    """
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    free_memory()
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise MemoryLimitError(
            f"The memory ran out twice in {what}, which cannot be cut smaller. Free memory on this machine, or lower "
            f"data.train_batch_size, actor_rollout_ref.rollout.n or data.max_response_length. {error}"
        ) from error
