"""The worker that grades responses with the user's reward function."""

from pathlib import Path

import torch

from moonshift.core.batch import Batch
from moonshift.core.config import config_from_json
from moonshift.core.rewards import load_reward, score_sample
from moonshift.core.types import Prompt, Sample


class RewardWorker:
    """Role reward: one process, so that a reward that crashes takes nothing else with it."""

    def __init__(self, config_json: str) -> None:
        reward = config_from_json(config_json).reward
        self.reward = load_reward(reward.function, reward.kwargs)

    def score(self, prompts: list[Prompt], rollouts: str, out: str) -> dict[str, list[float]]:
        """Grade every response of a rollout batch; `prompts[g]` is the prompt of group g.

        Writes the dense columns `score` and `score/<component>`, `[B]` float32, to `out` and returns them.

        Raises:
            RewardError: when the function raises or returns what is not a reward, naming the sample.
        """
        batch = Batch.load(Path(rollouts))
        graded: dict[str, list[float]] = {}
        for group, response, reason, length in zip(
            batch.rows("group"),
            batch.rows("response"),
            batch.rows("finish_reason"),
            batch.ragged("response_ids").lengths.tolist(),
            strict=True,
        ):
            sample = Sample(prompt=prompts[group], response=response, finish_reason=reason, response_tokens=length)
            for name, value in score_sample(self.reward, sample).items():
                graded.setdefault(name, []).append(value)
        columns = {
            "score" if name == "score" else f"score/{name}": torch.tensor(values, dtype=torch.float32)
            for name, values in graded.items()
        }
        Batch(columns).save(Path(out))
        return graded
