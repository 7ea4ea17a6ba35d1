"""Which rows each step trains on: a pure function of the step.

Invariant: nothing is iterated and nothing is left over, so a resumed run reads the same rows as an unbroken one;
the position stored with a checkpoint only proves that data and batch size are still those of the checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import DataError
from .mixture import Mixture
from .permutation import shuffled


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSampler:
    """A continuous stream over epochs, cut into batches.

    Each epoch holds each row exactly once, in an order of its own. A batch may straddle an epoch's end; it can then
    hold one row twice, in two epochs, which is why `indices` gives (epoch, row) and not the row alone. With a
    `mixture` an epoch is as many draws, shared out by weight, and the first number is the pass over the row's source.

    Example: 5 rows in batches of 4, not shuffled: step 1 reads rows 0 1 2 3 of epoch 0, step 2 row 4 of epoch 0 and
    rows 0 1 2 of epoch 1.

    Raises DataError where there are fewer rows than one batch needs.
    """

    num_rows: int
    batch_size: int
    """prompts a step"""
    seed: int
    shuffle: bool
    mixture: Mixture | None = None
    """sources with weights; None: every row once an epoch"""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"data.train_batch_size is {self.batch_size}; a step needs at least 1 prompt.")
        if self.num_rows < self.batch_size:
            raise DataError(
                f"The training data has {self.num_rows} rows, but data.train_batch_size is {self.batch_size}: "
                f"not one step could be made. Set data.train_batch_size to {self.num_rows} or less, or add data."
            )
        if self.mixture is not None and sum(self.mixture.sizes) != self.num_rows:
            raise ValueError(f"a mixture of {self.mixture.sizes} rows for {self.num_rows}")
        if not 0 <= self.seed < 2**64:
            raise DataError(f"data.seed is {self.seed}; it must be from 0 to 2^64 - 1.")

    def indices(self, step: int) -> list[tuple[int, int]]:
        """(epoch, row) of each prompt of `step`; steps count from 1, epochs and rows from 0."""
        if step < 1:
            raise ValueError(f"step is {step}; steps count from 1")
        return self.stretch((step - 1) * self.batch_size, self.batch_size)

    def stretch(self, start: int, count: int) -> list[tuple[int, int]]:
        """(epoch, row) of `count` prompts from the stream's position `start` on, from 0."""
        return [self._at(position) for position in range(start, start + count)]

    def steps_per_epochs(self, total_epochs: int) -> int:
        """Whole batches in `total_epochs` passes.

        Rows left at the very end, fewer than one batch, are not trained on: a step more would begin a pass that
        nobody asked for.
        """
        return self.num_rows * total_epochs // self.batch_size

    def state(self, step: int) -> dict[str, int]:
        """Position after `step` steps, that is of the first row of step + 1; step 0 is the start."""
        return self.state_at(step * self.batch_size)

    def state_at(self, position: int) -> dict[str, int]:
        """Position in the stream as epoch and row within it, with what it depends on."""
        epoch, offset = divmod(position, self.num_rows)
        return {
            "epoch": epoch,
            "offset": offset,
            "seed": self.seed,
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
            **({} if self.mixture is None else {"mixture": self.mixture.fingerprint}),
        }

    def from_state(self, state: Mapping[str, int]) -> int:
        """The number of steps after which `state` was taken.

        Raises DataError where it was taken with another seed, batch size, number of rows or mixture, or is no position
        between two batches.
        """
        for key in ("seed", "num_rows", "batch_size", "mixture"):
            given, now = state.get(key), self.state(0).get(key)
            if given != now:
                raise DataError(
                    f"The checkpoint's data position was taken with {key} = {given}, but it is {now} now. "
                    f"Resume with the data and settings of the checkpoint, or start a new run."
                )
        position = state.get("epoch", -1) * self.num_rows + state.get("offset", -1)
        if position < 0 or position % self.batch_size or dict(state) != self.state(position // self.batch_size):
            raise DataError(
                f"The checkpoint's data position {dict(state)} does not lie between two batches of {self.batch_size}."
                f" The checkpoint is damaged: resume from an older one."
            )
        return position // self.batch_size

    def _at(self, position: int) -> tuple[int, int]:
        if self.mixture is not None:
            return self.mixture.at(position)
        epoch, offset = divmod(position, self.num_rows)
        if not self.shuffle:
            return epoch, offset
        return epoch, shuffled(self.num_rows, self.seed, epoch)[offset]
