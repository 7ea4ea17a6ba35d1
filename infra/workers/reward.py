"""The workers that grade responses with the user's reward function."""

from pathlib import Path

import torch

from moonshift.core.batch import Batch
from moonshift.core.config import config_from_json
from moonshift.core.errors import RewardError
from moonshift.core.rewards import load_rewards
from moonshift.core.types import Prompt, Sample

from ..home import stacks_folder
from . import stacks


class RewardWorker:
    """Role reward: one process, so that a reward that crashes takes nothing else with it."""

    def __init__(self, config_json: str) -> None:
        self.rewards = load_rewards(config_from_json(config_json).reward)

    def identify(self) -> int:
        """This process's id, from then on one that writes its stack when asked (`stacks`)."""
        return stacks.enable(stacks_folder())

    def grade(self, prompts: list[Prompt], rollouts: str, rows: range) -> dict[str, list[float]]:
        """Scores by component of the given rows of a rollout batch; `prompts[g]` is the prompt of group g.

        Raises:
            RewardError: when the function raises or returns what is not a reward, naming the sample.
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
        graded: dict[str, list[float]] = {}
        for sample, result in zip(samples, self.rewards.grade(samples), strict=True):
            if result.components is None:
                raise RewardError(str(result.error))
            if graded and result.components.keys() != graded.keys():
                raise RewardError(
                    f"The reward returned the components {sorted(result.components)} on {sample.prompt.uid} and "
                    f"{sorted(graded)} before; return the same keys for every sample."
                )
            for name, value in result.components.items():
                graded.setdefault(name, []).append(value)
        return graded


def write_scores(graded: dict[str, list[float]], out: Path) -> None:
    """Write the dense columns `score` and `score/<component>`, `[B]` float32, to `out`."""
    Batch(
        {
            "score" if name == "score" else f"score/{name}": torch.tensor(values, dtype=torch.float32)
            for name, values in graded.items()
        }
    ).save(out)
