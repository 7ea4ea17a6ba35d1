"""The plain values and contracts that the rooms share."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # keeps `import moonshift.core.types` free of torch
    import torch

    from .batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRef:
    """Where a stage's committed output lies: all that crosses a task's border."""

    run_id: str
    step: int
    stage: str
    path: str
    """folder below the run's folder"""
    digest: str
    """SHA-256 of the output, hex"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a data set, checked and ready to be rendered.

    Example: `Prompt(uid="train.jsonl:17", messages=({"role": "user", "content": "3+4="},), text="3+4=",
    answer="7", source="train.jsonl", extra={"difficulty": 3})`.
    """

    uid: str
    """unique in the run; groups, seeds and ledger rows are keyed by it, never by the text"""
    messages: tuple[dict[str, str], ...]
    """chat turns; a plain text prompt is one user turn"""
    text: str
    """the prompt as plain text: the last user turn"""
    answer: Any
    """the right answer, as the reward wants it"""
    source: str
    """file or source the row came from (`data_source` of the metrics)"""
    extra: dict[str, Any]
    """all further columns, given to the reward"""
    answer_column: str = "answer"
    """name of the column that `answer` came from: rewards that take columns by name get it under that name"""
    chat: bool = False
    """the row held a list of turns, not plain text"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a reward function sees of one response."""

    prompt: Prompt
    response: str
    """decoded text without the trailing stop token"""
    finish_reason: str
    """stop | length"""
    response_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How responses are drawn."""

    n: int
    temperature: float
    """0 is greedy"""
    top_p: float
    top_k: int
    """-1: all"""
    max_new_tokens: int
    stop_ids: tuple[int, ...]


class RolloutEngine(Protocol):
    """Generates; knows nothing of rewards, training or files."""

    @property
    def version(self) -> int:
        """Policy version whose weights are served."""
        ...

    def generate(
        self,
        prompts: "list[list[int]]",
        params: SamplingParams,
        seeds: "list[int]",
        on_sample: Callable[[int, list[int]], None] | None = None,
    ) -> "Batch":
        """Draw `params.n` responses for each of B prompts; `on_sample(row, ids)` is told of each as it is whole.

        `seeds`: one a response, `[B * n]`. Returns a Batch of B·n rows in prompt order with the ragged columns
        `prompt_ids`, `response_ids`, `rollout_log_probs` and the text column `finish_reason` (stop | length).
        """
        ...

    def load_weights(self, weights: "Iterable[tuple[str, torch.Tensor]]", version: int) -> None:
        """Take over weights by name; `version` is what samples carry from now on."""
        ...

    def budget(self, max_sequences: int) -> None:
        """Bound the sequences generated at once; same samples, longer queue."""
        ...

    def sleep(self) -> None:
        """Free the engine's memory for training."""
        ...

    def wake(self) -> None:
        """Take it back for rollout."""
        ...


class TrainEngine(Protocol):
    """Computes log-probs and updates weights; knows nothing of Ray, files or flows."""

    def log_probs(self, batch: "Batch") -> "Batch":
        """`batch` with the ragged columns `log_probs` and `entropy`, one value a response token."""
        ...

    def update(self, batch: "Batch") -> dict[str, float]:
        """One pass of optimizer steps over the batch; metrics under verl's names."""
        ...

    def weights(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """All parameters by name, in a fixed order."""
        ...
