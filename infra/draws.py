"""Which prompts a step draws, generation by generation: a pure function of what the ledger holds.

Without dynamic sampling a step draws one batch, by its number alone. With it (DAPO), it draws again while it has too
few groups with signal, so where a step begins in the data depends on the steps before; every number that this follows
from is in a committed stage, and a resumed run draws what the unbroken one drew. A fork begins where its parent was.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moonshift.core.algorithms import GroupBuffer, has_signal
from moonshift.core.batch import Batch
from moonshift.core.config.schema import Config
from moonshift.core.datasets.sampler import PromptSampler
from moonshift.core.rewards.graded import REWARD_ERROR
from moonshift.core.types import StageRef

from .commits import StageLookup
from .origin import CARRIED as CARRIED_FOLDER
from .origin import Origin

SELECT = "select"
"""The stage that keeps groups with signal."""
POSITION = "training/data_position"
"""Prompts drawn by the run so far, a metric of that stage."""
CARRIED = "training/filter_groups/carried_out"
TRAINED = "training/filter_groups/trained"


def round_name(stage: str, round_: int) -> str:
    """`rollout`, then `rollout-2`, `rollout-3` …"""
    return stage if round_ == 1 else f"{stage}-{round_}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The run whose prompts are drawn."""

    run_id: str
    folder: Path
    origin: Origin


class Draws:
    """The prompts of each generation of a run."""

    def __init__(self, ledger: StageLookup, run: Run, config: Config, sampler: PromptSampler) -> None:
        self._ledger, self._run_id, self._folder, self._origin = ledger, run.run_id, run.folder, run.origin
        self._settings = config.algorithm.filter_groups
        self._num_prompts = config.data.train_batch_size
        self.sampler = sampler

    def rows(self, step: int, round_: int) -> list[tuple[int, int]]:
        """(epoch, row) of each prompt of one generation; generations count from 1."""
        if not self._settings.enable:
            return self.sampler.stretch(self.position(step - 1), self._num_prompts)
        start, buffer = self.position(step - 1), self.begin(step)
        for earlier in range(1, round_):
            start += buffer.num_to_generate
            buffer = self.after(buffer, step, earlier)
        return self.sampler.stretch(start, buffer.num_to_generate)

    def position(self, step: int) -> int:
        """Prompts that were drawn up to the end of `step`."""
        if not self._settings.enable:
            return self._origin.data_position + (step - self._origin.step) * self._num_prompts
        committed = self._ledger.stage(self._run_id, step, SELECT)
        return self._origin.data_position if committed is None else int(committed.metrics[POSITION])

    def begin(self, step: int) -> GroupBuffer:
        """The buffer that a step begins with: what the step before carried over."""
        before = self._ledger.stage(self._run_id, step - 1, SELECT)
        carried = self._origin.carried if before is None else int(before.metrics[CARRIED])
        return GroupBuffer(
            num_needed=self._num_prompts,
            max_refills=self._settings.max_num_gen_batches - 1,
            carried=tuple(range(-carried, 0)),
        )

    def surplus(self, step: int) -> Path:
        """Folder of what the step before carried over, where `begin` says that there is any."""
        before = self._ledger.stage(self._run_id, step - 1, SELECT)
        return self._folder / (CARRIED_FOLDER if before is None else f"{before.path}/surplus")

    def after(self, buffer: GroupBuffer, step: int, round_: int) -> GroupBuffer:
        """The buffer after the committed generation `round_`, whose groups get numbers of their own."""
        rollouts = self._ledger.stage(self._run_id, step, round_name("rollout", round_))
        scores = self._ledger.stage(self._run_id, step, round_name("score", round_))
        assert rollouts is not None and scores is not None, "a generation is drawn on before it is committed"
        signal = self.signal(self._folder / rollouts.path, self._folder / scores.path)
        first = buffer.num_dropped + len(buffer.kept)
        return buffer.received(range(first, first + len(signal)), signal)

    def signal(self, rollouts: Path, scores: Path) -> list[bool]:
        """For each group of a generation whether its samples differ by the metric; those with an error do not count."""
        metric = "score" if self._settings.metric == "score" else f"score/{self._settings.metric}"
        groups = Batch.load(rollouts).dense("group")
        graded = Batch.load(scores)
        if metric not in graded.names and not torch.isfinite(graded.dense("score")).any():
            return [False] * (int(groups.max()) + 1)  # no sample has a reward, so nothing has components
        values = graded.dense(metric).float()
        found = has_signal(values, groups, valid=torch.isfinite(values))
        return [bool(found[int((groups == group).nonzero()[0])]) for group in range(int(groups.max()) + 1)]


def write_selection(
    out: Path, buffer: GroupBuffer, generations: list[tuple[Path, Path]], surplus: Path | None
) -> dict[str, float]:
    """Write the groups to train on to `out/rollout` and `out/score`, those to carry over below `out/surplus`.

    `generations`: folders of rollouts and scores, in order; `surplus`: what the step before carried over. A step in
    which no group has signal trains on what was generated first, whose advantages are all 0.
    """
    batches = [_joined(rollouts, scores) for rollouts, scores in generations]
    carried = [] if surplus is None else [_joined(surplus / "rollout", surplus / "score")]
    groups: dict[int, Batch] = {}
    number = -len(buffer.carried)
    for batch in [*carried, *batches]:
        of_row = batch.dense("group")
        for group in range(int(of_row.max()) + 1):
            groups[number] = batch.reorder((of_row == group).nonzero().squeeze(1))
            number += 1
    trained = buffer.trained or tuple(range(int(batches[0].dense("group").max()) + 1))
    _write(out, [groups[group] for group in trained])
    if buffer.surplus:
        _write(out / "surplus", [groups[group] for group in buffer.surplus])
    return buffer.metrics()


def _joined(rollouts: Path, scores: Path) -> Batch:
    return Batch.load(rollouts).union(Batch.load(scores))


def _write(out: Path, groups: list[Batch]) -> None:
    """One batch of the groups, numbered from 0 in this order, split into its rollouts and its scores again.

    Groups that were carried over were sampled one policy version before the others; the batch bears the newest.
    """
    newest: dict[str, Any] = max((group.meta for group in groups), key=lambda meta: meta.get("policy_version", 0))
    numbered = [
        group.with_columns({"group": torch.full((len(group),), number, dtype=torch.int64)})
        for number, group in enumerate(groups)
    ]
    whole = Batch.concat([Batch({name: group[name] for name in group.names}, newest) for group in numbered])
    scores = [name for name in whole.names if name in ("score", REWARD_ERROR) or name.startswith("score/")]
    whole.select([name for name in whole.names if name not in scores]).save(out / "rollout")
    whole.select(scores).save(out / "score")


def part(ref: StageRef, name: str) -> StageRef:
    """One folder of a stage's output, as a reference of its own."""
    return StageRef(run_id=ref.run_id, step=ref.step, stage=ref.stage, path=f"{ref.path}/{name}", digest=ref.digest)
