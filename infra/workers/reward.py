"""The worker that grades responses with the user's reward functions, in a pool of processes of its own."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from moonshift.core.batch import Batch
from moonshift.core.config import config_from_json
from moonshift.core.rewards.graded import REWARD_ERROR, Graded
from moonshift.core.types import Prompt, Sample

from ..home import stacks_folder
from ..rewards import Arrivals, Finished, RewardPool
from ..rewards.wire import packed_graded
from . import stacks


class RewardWorker:
    """Role reward: owns the processes in which the user's code runs; runs none of it itself."""

    def __init__(self, config_json: str) -> None:
        """Raises RewardError when the reward cannot be loaded."""
        config = config_from_json(config_json)
        recovery = config.recovery
        self.pool = RewardPool(
            config.reward,
            start_timeout_s=recovery.start_timeout_s,
            # what it leaves undone is graded again sample by sample, within the stage's own time
            longest_s=min(recovery.stage_timeout_s, recovery.stage_patience_s) / 2,
        )
        self._thread = ThreadPoolExecutor(1, "grading")
        self._arrivals: Arrivals | None = None

    def identify(self) -> int:
        """This process's id, from then on one that writes its stack when asked (`stacks`)."""
        return stacks.enable(stacks_folder())

    def expect(self, prompts: list[Prompt], count: int) -> bool:
        """Whether samples of a batch to come, `count` a prompt, may be sent to `arrived` while it is generated: not
        where a function takes the whole batch at once. What arrived of another batch is forgotten."""
        streams = not self.pool.whole_batch
        self._arrivals = Arrivals(self.pool, self._thread, prompts, count) if streams else None
        return streams

    def arrived(self, finished: list[Finished]) -> None:
        """Begin to grade samples of the batch that is expected."""
        if self._arrivals is not None:
            self._arrivals.add(finished)

    def grade(self, prompts: list[Prompt], rollouts: str, rows: range) -> tuple[list[list[object]], float]:
        """`[components, None]` or `[None, reason]` for each of the given rows of a rollout batch, and the seconds from
        when the last of them was there until all had a result.

        `prompts[g]` is the prompt of group g. Raises RewardError when a sample cannot be handed to a process.
        """
        began_at = time.monotonic()
        batch = Batch.load(Path(rollouts)).reorder(torch.arange(rows.start, rows.stop))
        samples = [
            Sample(prompt=prompts[group], response=response, finish_reason=reason, response_tokens=length)
            for group, response, reason, length in zip(
                batch.rows("group"),
                batch.rows("response"),
                batch.rows("finish_reason"),
                batch.ragged("response_ids").lengths.tolist(),
                strict=True,
            )
        ]
        arrivals, self._arrivals = self._arrivals, None
        graded = arrivals.results(rows, samples) if arrivals is not None else {}
        if arrivals is not None and graded:
            began_at = arrivals.last_at
        missing = {row: sample for row, sample in zip(rows, samples, strict=True) if row not in graded}
        graded |= dict(zip(missing, self.pool.grade(list(missing.values())), strict=True))
        return [packed_graded(graded[row]) for row in rows], time.monotonic() - began_at


def alike(graded: Sequence[Graded]) -> list[Graded]:
    """The results, with an error where a sample has other components than the first that has any."""
    names = next((each.components.keys() for each in graded if each.components), None)
    found = []
    for each in graded:
        if each.components is not None and each.components.keys() != names:
            reason = (
                f"The reward returned the components {sorted(each.components)}, and {sorted(names or ())} for the "
                f"samples before; return the same keys for every sample."
            )
            each = Graded(components=None, error=reason)
        found.append(each)
    return found


def write_graded(graded: Sequence[Graded], out: Path) -> None:
    """Write what `write_scores` writes, and the text column `reward_error`.

    A sample with an error has NaN for numbers, never 0.
    """
    names = next((list(each.components) for each in graded if each.components), ["score"])
    values = {name: [each.components[name] if each.components else float("nan") for each in graded] for name in names}
    write_scores(values, out, [each.error or "" for each in graded])


def write_scores(values: Mapping[str, Sequence[float]], out: Path, errors: Sequence[str] | None = None) -> None:
    """Write the dense columns `score` and `score/<component>`, `[B]` float32, to `out`; NaN where there is none."""
    columns: dict[str, Any] = {
        "score" if name == "score" else f"score/{name}": torch.tensor(numbers, dtype=torch.float32)
        for name, numbers in values.items()
    }
    Batch(columns if errors is None else columns | {REWARD_ERROR: list(errors)}).save(out)
