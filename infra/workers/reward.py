"""The worker that grades responses with the user's reward functions, in a pool of processes of its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moonshift.core.batch import Batch
from moonshift.core.config import config_from_json
from moonshift.core.rewards.graded import REWARD_ERROR, Graded
from moonshift.core.types import Prompt, Sample

from ..home import stacks_folder
from ..rewards import RewardPool
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

    def identify(self) -> int:
        """This process's id, from then on one that writes its stack when asked (`stacks`)."""
        return stacks.enable(stacks_folder())

    def grade(self, prompts: list[Prompt], rollouts: str, rows: range) -> list[list[object]]:
        """`[components, None]` or `[None, reason]` for each of the given rows of a rollout batch.

        `prompts[g]` is the prompt of group g. Raises RewardError when a sample cannot be handed to a process.
        """
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
        return [packed_graded(each) for each in self.pool.grade(samples)]


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
