"""Folders, patterns and hub names to files: what is read, and what is refused instead of guessed."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moonshift.core.datasets import load_prompts
from moonshift.core.datasets.counting import count_rows
from moonshift.core.errors import DataError
from moonshift.core.types import Prompt


def load(entry: Path | str) -> list[Prompt]:
    return load_prompts([str(entry)], prompt_key="prompt", answer_key="answer", system_prompt=None)


def rows(*texts: str) -> list[dict[str, Any]]:
    return [{"prompt": text, "answer": "1"} for text in texts]


def parquet(file: Path, *texts: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows(*texts)), file)


def refused(entry: Path | str) -> str:
    with pytest.raises(DataError) as raised:
        load(entry)
    return str(raised.value)


def test_a_folder_that_datasets_saved_is_read_in_its_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(rows("a", "b", "c", "d", "e"))
    whole.save_to_disk(tmp_path / "saved", num_shards=2)
    assert [prompt.text for prompt in load(tmp_path / "saved")] == ["a", "b", "c", "d", "e"]
    assert load(tmp_path / "saved")[3].uid == "data-00001-of-00002.arrow:0"
    assert count_rows([str(tmp_path / "saved")]) == 5
    whole.select([4, 0]).save_to_disk(tmp_path / "chosen")
    assert [prompt.text for prompt in load(tmp_path / "chosen")] == ["e", "a"]
    datasets.DatasetDict(train=whole, test=whole.select([1])).save_to_disk(tmp_path / "splits")
    message = refused(tmp_path / "splits")
    assert "holds the splits train, test" in message and str(tmp_path / "splits" / "test") in message
    assert [prompt.text for prompt in load(tmp_path / "splits" / "test")] == ["b"]
    datasets.DatasetDict(train=whole).save_to_disk(tmp_path / "one")
    assert len(load(tmp_path / "one")) == 5
    next((tmp_path / "saved").glob("data-00000*")).unlink()
    assert "not all there" in refused(tmp_path / "saved")


def test_an_arrow_file_of_either_kind_is_read(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(rows("a", "b"))
    with pa.ipc.new_file(tmp_path / "f.arrow", table.schema) as file:
        file.write_table(table)
    with pa.ipc.new_stream(tmp_path / "s.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=1)
    assert [prompt.text for name in "fs" for prompt in load(tmp_path / f"{name}.arrow")] == ["a", "b", "a", "b"]
    (tmp_path / "x.arrow").write_bytes(b"no arrow here")
    assert "not a readable Arrow file" in refused(tmp_path / "x.arrow")


def test_a_folder_of_parquet_is_read_by_name_and_two_splits_are_never_mixed(tmp_path: Path) -> None:
    parquet(tmp_path / "set" / "data" / "train-00001-of-00002.parquet", "c")
    parquet(tmp_path / "set" / "data" / "train-00000-of-00002.parquet", "a", "b")
    (tmp_path / "set" / "README.md").write_text("about")
    (tmp_path / "set" / "dataset_info.json").write_text("{}")
    assert [prompt.text for prompt in load(tmp_path / "set")] == ["a", "b", "c"]
    assert load(tmp_path / "set")[2].uid == "train-00001-of-00002.parquet:0"
    assert count_rows([str(tmp_path / "set")]) == 3
    parquet(tmp_path / "set" / "data" / "test-00000-of-00001.parquet", "t")
    message = refused(tmp_path / "set")
    assert "holds the splits test, train" in message and "data/test*.parquet" in message
    assert [prompt.text for prompt in load(f"{tmp_path}/set/data/train*.parquet")] == ["a", "b", "c"]
    assert "no file has a name of this pattern" in refused(f"{tmp_path}/set/data/dev*.parquet")


def test_a_folder_of_several_forms_or_of_none_is_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", "a")
    (tmp_path / "b.jsonl").write_text(json.dumps(rows("b")[0]) + "\n")
    assert "holds .parquet and .jsonl files; name one form" in refused(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "holds no .parquet" in refused(tmp_path / "empty")


@pytest.mark.case("S04")
def test_a_loading_script_is_named_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    message = refused(folder)
    assert "scripted.py" in message and "never run" in message and "save its rows as Parquet" in message
    assert not marker.exists()


def test_a_hub_name_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    for entry in ("nobody/no-such-set", "hub:nobody/no-such-set?split=test"):
        message = refused(entry)
        assert "nobody/no-such-set" in message and "HF_HUB_OFFLINE=0" in message and "no such file or folder" in message
    assert "unknown parameter 'splt'; did you mean 'split'?" in refused("hub:nobody/no-such-set?splt=test")
    with pytest.raises(DataError, match="counted by moonshift check-data"):
        count_rows(["hub:nobody/no-such-set"])


def test_a_hub_name_is_read_with_its_split_through_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    parquet(tmp_path / "acme" / "sums" / "train-00000-of-00001.parquet", "a", "b")
    parquet(tmp_path / "acme" / "sums" / "test-00000-of-00001.parquet", "t")
    assert [(prompt.text, prompt.source) for prompt in load("hub:acme/sums")] == [
        ("a", "acme/sums"),
        ("b", "acme/sums"),
    ]
    assert [prompt.text for prompt in load("hub:acme/sums?split=test")] == ["t"]
    assert 'Unknown split "dev"' in refused("hub:acme/sums?split=dev")


def test_a_missing_datasets_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'moonshift[hub]'" in refused("hub:acme/sums")
