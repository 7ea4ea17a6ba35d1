"""Files that appear whole or not at all: what is flushed, in which order, and what a crash leaves behind."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moonshift.infra.files import clear_leftovers, folder_digest, publish, remove, write_text


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(fsync | rename, name) in the order in which the operating system was asked."""
    seen: list[tuple[str, str]] = []
    flush, rename = os.fsync, os.rename

    def fsync(file: int) -> None:
        seen.append(("fsync", Path(os.readlink(f"/proc/self/fd/{file}")).name))
        flush(file)

    def renamed(source: Any, target: Any, **options: Any) -> None:
        seen.append(("rename", Path(target).name))
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", renamed)
    return seen


def half_made(folder: Path) -> Path:
    temporary = folder / ".place.1.tmp"
    (temporary / "model").mkdir(parents=True)
    (temporary / "model" / "weights").write_bytes(b"w" * 100)
    (temporary / "state.json").write_text("{}")
    return temporary


def test_a_folder_gets_its_name_after_all_its_bytes_are_on_the_disk(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    temporary = half_made(tmp_path)
    publish(temporary, tmp_path / "place")
    renamed = calls.index(("rename", "place"))
    flushed = {name for kind, name in calls[:renamed] if kind == "fsync"}
    assert flushed == {"weights", "state.json", "model", temporary.name}
    assert calls[renamed + 1 :] == [("fsync", tmp_path.name)], "the name itself is not on the disk yet"


def test_what_lay_there_uncommitted_makes_way(tmp_path: Path) -> None:
    publish(half_made(tmp_path), tmp_path / "place")
    again = half_made(tmp_path)
    (again / "state.json").write_text("[1]")
    publish(again, tmp_path / "place")
    assert (tmp_path / "place" / "state.json").read_text() == "[1]"
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_names_change_while_they_are_held_and_bytes_are_flushed_and_deleted_before_and_after(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    publish(half_made(tmp_path), tmp_path / "place")
    calls.clear()

    @contextmanager
    def alone() -> Iterator[None]:
        calls.append(("held", ""))
        yield
        assert list(tmp_path.glob(".*.deleted")), "deleting takes long: not while others wait"
        calls.append(("left", ""))

    publish(half_made(tmp_path), tmp_path / "place", alone())
    held, left = calls.index(("held", "")), calls.index(("left", ""))
    assert [kind for kind, _ in calls[held:left]] == ["held", "rename", "rename"]
    assert {kind for kind, _ in calls[:held] + calls[left + 1 :]} == {"fsync"}


def test_a_text_is_replaced_in_one_rename_and_flushed_before(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    write_text(tmp_path / "a.json", "old")
    calls.clear()
    write_text(tmp_path / "a.json", "new")
    assert [kind for kind, _ in calls] == ["fsync", "rename", "fsync"]
    assert (tmp_path / "a.json").read_text() == "new"


def test_a_half_deleted_folder_has_no_name_and_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(half_made(tmp_path), tmp_path / "place")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", killed)
        remove(tmp_path / "place")
    assert not (tmp_path / "place").exists() and list(tmp_path.iterdir())
    half_made(tmp_path)
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_digest_sees_every_name_and_byte(tmp_path: Path) -> None:
    folder = half_made(tmp_path)
    digests = {folder_digest(folder)}
    (folder / "state.json").write_text("[]")
    digests.add(folder_digest(folder))
    (folder / "state.json").rename(folder / "other.json")
    digests.add(folder_digest(folder))
    (folder / "empty").touch()
    digests.add(folder_digest(folder))
    assert len(digests) == 4
