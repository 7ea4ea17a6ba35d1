"""Groups that a step carries over are trained on by the next one, beside groups of a newer policy."""

from pathlib import Path

import torch

from moonshift.core.algorithms import GroupBuffer
from moonshift.core.batch import Batch, Ragged
from moonshift.infra.draws import write_selection


def generation(folder: Path, first: int, groups: int, version: int) -> tuple[Path, Path]:
    """Two samples a group; the response of group g is the token `first + g`."""
    of_row = torch.arange(groups).repeat_interleave(2)
    columns = {"response_ids": Ragged.from_list([[first + int(group)] for group in of_row], torch.int64)}
    Batch({**columns, "group": of_row}, {"policy_version": version}).save(folder / "rollout")
    Batch({"score": torch.tensor([0.0, 1.0] * groups)}).save(folder / "score")
    return folder / "rollout", folder / "score"


def test_carried_groups_come_first_in_a_batch_of_two_policy_versions(tmp_path: Path) -> None:
    buffer = GroupBuffer(num_needed=2, max_refills=1).received([0, 1, 2], [True] * 3)
    write_selection(tmp_path / "first", buffer, [generation(tmp_path / "one", 10, 3, 1)], None)
    carried = GroupBuffer(num_needed=2, max_refills=1, carried=(-1,)).received([0], [True])
    second = generation(tmp_path / "two", 20, 1, 2)
    metrics = write_selection(tmp_path / "second", carried, [second], tmp_path / "first" / "surplus")
    trained = Batch.load(tmp_path / "second" / "rollout")
    assert [ids.tolist() for ids in trained.rows("response_ids")] == [[12], [12], [20], [20]]
    assert trained.dense("group").tolist() == [0, 0, 1, 1] and trained.meta == {"policy_version": 2}
    assert metrics["training/filter_groups/carried_in"] == 1
