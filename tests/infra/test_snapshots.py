"""Checkpoints: whole by their manifest or passed over; the newest is verified before an older one goes."""

from pathlib import Path

import pytest

from moonshift.core.errors import CheckpointError
from moonshift.infra import snapshots
from moonshift.infra.files import publish


def make(checkpoints: Path, step: int) -> Path:
    temporary = checkpoints / f".step-{step}.tmp"
    (temporary / "model").mkdir(parents=True)
    (temporary / "model" / "weights").write_bytes(bytes(range(200)) * step)
    (temporary / "state.json").write_text("{}")
    snapshots.seal(temporary, step=step, identity="i")
    place = snapshots.folder_of(checkpoints, step)
    publish(temporary, place)
    return place


def test_a_sealed_checkpoint_verifies(tmp_path: Path) -> None:
    manifest = snapshots.verify(make(tmp_path, 3))
    assert manifest.step == 3 and set(manifest.files) == {"model/weights", "state.json"}
    assert manifest.bytes == 602


@pytest.mark.case("K04")
@pytest.mark.parametrize("name", ["model/weights", "state.json", "manifest.json"])
def test_a_flipped_or_missing_or_cut_file_is_found_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    make(tmp_path, 1)
    for fault in ("flip", "cut", "missing"):
        file = make(tmp_path, 2) / name
        content = file.read_bytes()
        if fault == "missing":
            file.unlink()
        else:
            file.write_bytes(content[:-1] if fault == "cut" else bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(CheckpointError):
            snapshots.verify(file.parent if "/" not in name else file.parent.parent)
        found = snapshots.newest(tmp_path)
        assert found is not None and found[1].step == 1


@pytest.mark.case("K06")
def test_retention_counts_in_numbers_and_keeps_the_newest(tmp_path: Path) -> None:
    for step in (9800, 9900, 10000):
        make(tmp_path, step)
    assert snapshots.retire(tmp_path, keep=2) == [9800]
    assert snapshots.steps_on_disk(tmp_path) == [9900, 10000]


@pytest.mark.case("K05")
def test_nothing_is_deleted_for_a_broken_successor(tmp_path: Path) -> None:
    make(tmp_path, 1)
    (make(tmp_path, 2) / "state.json").write_text("x")
    with pytest.raises(CheckpointError):
        snapshots.retire(tmp_path, keep=1)
    assert snapshots.steps_on_disk(tmp_path) == [1, 2]


def test_a_manifest_cannot_name_a_file_outside(tmp_path: Path) -> None:
    place = make(tmp_path, 1)
    manifest = (place / "manifest.json").read_text().replace("state.json", "../../state.json")
    (place / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match="outside"):
        snapshots.verify(place)
