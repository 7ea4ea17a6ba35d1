"""Data files and procedural sources to prompts, and every fault named with file, row and column."""

import json
import subprocess
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moonshift.core.datasets import load_prompts
from moonshift.core.errors import DataError
from moonshift.core.types import Prompt

CHAIN_SUM = "reasoning_gym:chain_sum?size=20&seed=1&min_terms=2&max_terms=2&min_digits=1&max_digits=1"


def load(*files: Path | str, **options: Any) -> list[Prompt]:
    settings = {"prompt_key": "prompt", "answer_key": "answer", "system_prompt": None} | options
    return load_prompts([str(file) for file in files], **settings)


def jsonl(folder: Path, *rows: Any, name: str = "train.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return file


def fault(*files: Path | str, **options: Any) -> str:
    with pytest.raises(DataError) as raised:
        load(*files, **options)
    return str(raised.value)


def test_the_four_forms_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1? \u2028 so", "answer": "2", "level": "a"}, {"prompt": "2,\n3", "answer": "5", "level": "b"}]
    jsonl(tmp_path, *rows, name="d.jsonl")
    (tmp_path / "d.json").write_text(json.dumps(rows, ensure_ascii=False), "utf-8-sig")
    (tmp_path / "d.csv").write_text('prompt,answer,level\n1+1? \u2028 so,2,a\n"2,\n3",5,b\n', "utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    for form in ("jsonl", "json", "csv", "parquet"):
        prompts = load(tmp_path / f"d.{form}")
        assert [prompt.uid for prompt in prompts] == [f"d.{form}:0", f"d.{form}:1"]
        assert [(p.text, p.answer, p.extra, p.source) for p in prompts] == [
            (row["prompt"], row["answer"], {"level": row["level"]}, f"d.{form}") for row in rows
        ]
        assert prompts[0].messages == ({"role": "user", "content": rows[0]["prompt"]},)


def test_verls_schema_loads_from_parquet_in_many_chunks_as_plain_values(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{i}"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i, "cost": Decimal("1.50"), "ids": [i, i + 1]},
        }
        for i in range(2500)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "v.parquet", row_group_size=1000)
    prompts = load(tmp_path / "v.parquet")
    assert len(prompts) == 2500
    last = prompts[-1]
    assert (last.uid, last.text, last.answer, last.source) == ("v.parquet:2499", "q2499", "2499", "openai/gsm8k")
    assert last.extra["extra_info"] == {"index": 2499, "cost": "1.50", "ids": [2499, 2500]}
    assert json.loads(json.dumps([last.messages, last.extra])) == [list(last.messages), last.extra]


@pytest.mark.case("D01")
@pytest.mark.parametrize("rows", [5, 200_000])
def test_nested_columns_in_many_row_groups_become_plain_python_values(tmp_path: Path, rows: int) -> None:
    turns = pa.array([[{"role": "user", "content": f"q{row}"}] for row in range(rows)])
    models = pa.array([{"style": "rule", "ground_truth": str(row)} for row in range(rows)])
    table = pa.table({"prompt": turns, "reward_model": models})
    pq.write_table(table, tmp_path / "v.parquet", row_group_size=1000)
    prompts = load(tmp_path / "v.parquet")
    assert len(prompts) == rows
    for row in (0, rows - 1):
        prompt = prompts[row]
        assert json.loads(json.dumps([prompt.messages, prompt.extra])) == [
            [{"role": "user", "content": f"q{row}"}],
            {"reward_model": {"style": "rule", "ground_truth": str(row)}},
        ]
        assert type(prompt.messages[0]) is dict and type(prompt.messages[0]["content"]) is str
        assert prompt.answer == str(row)


def test_dates_decimals_and_bytes_of_a_parquet_file_become_plain_values(tmp_path: Path) -> None:
    row = {"prompt": "q", "answer": Decimal("7.50"), "day": date(2026, 12, 1), "raw": b"ab", "tags": {"x": [1.5]}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "v.parquet")
    (prompt,) = load(tmp_path / "v.parquet")
    assert (prompt.answer, prompt.extra) == ("7.50", {"day": "2026-12-01", "raw": "YWI=", "tags": {"x": [1.5]}})


def test_keys_reach_into_columns_and_the_reward_still_sees_the_whole_column(tmp_path: Path) -> None:
    row = {"input": {"turns": "q"}, "reward_model": {"ground_truth": "7"}, "meta": {"origin": "book"}, "x.y": 1}
    keys = {"prompt_key": "input.turns", "answer_key": "reward_model.ground_truth", "source_key": "meta.origin"}
    (prompt,) = load(jsonl(tmp_path, row), **keys)
    assert (prompt.text, prompt.answer, prompt.source) == ("q", "7", "book")
    assert prompt.extra == row
    message = fault(jsonl(tmp_path, row), prompt_key="input.turn")
    assert "no row has the column 'input.turn'" in message and "Set data.prompt_key" in message
    assert "column input.turns: missing" in fault(jsonl(tmp_path, row, {"input": 3, "answer": "1"}), **keys)
    (prompt,) = load(jsonl(tmp_path, {"x.y": "q", "answer": "1"}), prompt_key="x.y")
    assert prompt.extra == {}


@pytest.mark.case("D02")
def test_a_null_prompt_is_named_with_file_row_and_column(tmp_path: Path) -> None:
    file = jsonl(
        tmp_path,
        '{"prompt":null,"answer":"2"}',
        '{"prompt":[{"role":"user","content":"1+1?"}],"answer":"2"}',
    )
    message = fault(file)
    assert f"{file}: row 0, column prompt: null prompt" in message
    assert "1 of 2 rows" in message


@pytest.mark.case("D03")
def test_every_further_column_reaches_the_prompt(tmp_path: Path) -> None:
    file = jsonl(tmp_path, {"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2", "difficulty": 3})
    assert load(file)[0].extra == {"difficulty": 3}
    assert load(file)[0].answer == "2"


@pytest.mark.case("D06")
def test_rows_with_the_same_text_keep_uids_of_their_own(tmp_path: Path) -> None:
    same = {"prompt": "2+2?", "answer": "4"}
    prompts = load(jsonl(tmp_path, same, same))
    assert [prompt.uid for prompt in prompts] == ["train.jsonl:0", "train.jsonl:1"]


@pytest.mark.case("D12")
def test_empty_and_mistyped_answers_are_rejected_or_become_text(tmp_path: Path) -> None:
    rows = [
        '{"prompt":"q1","answer":null}',
        '{"prompt":"q2","answer":""}',
        '{"prompt":"q3","answer":7}',
        '{"prompt":"","answer":"7"}',
        '{"prompt":"q5","answer":["7","seven"]}',
    ]
    message = fault(jsonl(tmp_path, *rows))
    assert "3 of 5 rows" in message
    for row, reason in ((0, "answer: null answer"), (1, "answer: empty answer"), (3, "prompt: empty prompt")):
        assert f"row {row}, column {reason}" in message
    assert "row 2" not in message
    assert "row 4" not in message
    accepted = load(jsonl(tmp_path, rows[2], rows[4], name="good.jsonl"))
    assert [prompt.answer for prompt in accepted] == ["7", ["7", "seven"]]


@pytest.mark.parametrize(
    ("answer", "kept"), [(7, "7"), (7.0, "7"), (0, "0"), (2.5, "2.5"), (" 7 ", " 7 "), ({"tests": [1]}, {"tests": [1]})]
)
def test_numbers_become_text_and_the_rest_stays(tmp_path: Path, answer: Any, kept: Any) -> None:
    assert load(jsonl(tmp_path, {"prompt": "q", "answer": answer}))[0].answer == kept


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": " ", "answer": "1"}, "column prompt: empty prompt"),
        ({"prompt": [], "answer": "1"}, "column prompt: empty prompt"),
        ({"prompt": 5, "answer": "1"}, "column prompt: int 5"),
        ({"prompt": ["x"], "answer": "1"}, "turn 0 is a str"),
        ({"prompt": [{"content": "x"}], "answer": "1"}, "turn 0 has no role"),
        ({"prompt": [{"role": "user", "content": None}], "answer": "1"}, "turn 0 (user) has NoneType as content"),
        ({"prompt": [{"role": "system", "content": "x"}], "answer": "1"}, "no user turn"),
        ({"prompt": [{"role": "user", "content": "x", "tool_calls": [1]}], "answer": "1"}, "has tool_calls"),
        ({"prompt": "q", "answer": [], "x": 1}, "column answer: empty answer"),
        ({"prompt": "q", "answer": ["1", None]}, "holds a null or empty answer"),
        ({"prompt": "q", "answer": True}, "the answer is True"),
        ('{"prompt": "q", "answer": NaN}', "null answer"),
        ('{"prompt": "q", "answer": Infinity}', "not a finite number"),
        ('{"prompt": "a\\ud83d", "answer": "1"}', "lone surrogate"),
        ({"prompt": "q", "gold": "1"}, "column answer: missing; the row has 'prompt', 'gold'"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path, row: Any, reason: str) -> None:
    message = fault(jsonl(tmp_path, {"prompt": "q", "answer": "1"}, row))
    assert "1 of 2 rows" in message
    assert "row 1, " in message
    assert reason in message


def test_the_first_five_bad_rows_are_listed_over_all_files(tmp_path: Path) -> None:
    bad = {"prompt": "q", "answer": None}
    message = fault(jsonl(tmp_path, *[bad] * 4, name="a.jsonl"), jsonl(tmp_path, *[bad] * 4, name="b.jsonl"))
    assert "8 of 8 rows" in message
    assert message.count("null answer") == 5
    assert "b.jsonl: row 0" in message


def test_a_missing_column_is_named_with_those_that_exist(tmp_path: Path) -> None:
    file = jsonl(tmp_path, {"question": "q", "answers": "1"})
    assert "the column 'prompt'. Columns: 'question', 'answers'. Set data.prompt_key" in fault(file)
    assert "the column 'answer'; did you mean 'answers'?" in fault(file, prompt_key="question")
    assert load(file, prompt_key="question", answer_key="answers")[0].answer == "1"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"prompt": "q", "answer": "1"}\n\n{"prompt": \n[1]\n', "a.jsonl:3: broken JSON"),
        ("b.jsonl", b"[1]\n", "b.jsonl:1: a list, not an object"),
        ("c.jsonl", b'{"prompt": "\xff"}\n', "not UTF-8 text at byte"),
        ("d.json", b'[{"prompt": "q",}]', "d.json:1: broken JSON"),
        ("e.json", b'{"prompt": "q"}', "holds a dict; a .json data file is one list"),
        ("f.json", b"[1]", "row 0 is a int"),
        ("g.csv", b"prompt,answer\na,b,c\n", "g.csv:2: row 0 has 3 cells, the header 2"),
        ("h.csv", b'prompt,answer\n"a,b\n', "broken CSV"),
        ("i.csv", b"prompt,prompt\na,b\n", "'prompt' twice"),
        ("j.parquet", b"PAR1 no", "not a readable Parquet file"),
        ("k.txt", b"q", "unknown form of data file '.txt'; use one of .jsonl"),
        ("l.jsonl", b"\n", "has no rows"),
        ("m.csv", b"prompt,answer\n", "has no rows"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_place(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    message = fault(tmp_path / name)
    assert name in message
    assert reason in message


def test_missing_files_folders_and_empty_lists_are_refused(tmp_path: Path) -> None:
    assert "no such file" in fault(tmp_path / "none.jsonl")
    (tmp_path / "d.jsonl").mkdir()
    assert "is a folder" in fault(tmp_path / "d.jsonl")
    assert "No data files are given" in fault()


def test_files_of_one_name_get_uids_of_their_own_and_a_file_is_named_once(tmp_path: Path) -> None:
    row = {"prompt": "q", "answer": "1"}
    files = [jsonl(tmp_path / folder, row) for folder in ("a", "b")]
    assert [prompt.uid for prompt in load(*files)] == ["a/train.jsonl:0", "b/train.jsonl:0"]
    assert "named twice" in fault(files[0], files[0])


def test_the_system_prompt_goes_first_and_never_replaces_a_rows_own(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]
    plain = load(jsonl(tmp_path, {"prompt": "q", "answer": "1"}), system_prompt="Be short.")[0]
    assert plain.messages == ({"role": "system", "content": "Be short."}, {"role": "user", "content": "q"})
    assert plain.text == "q"
    assert "unset one of them" in fault(jsonl(tmp_path, {"prompt": turns, "answer": "1"}), system_prompt="Be short.")


def test_sums_splits_are_disjoint_complete_and_fixed() -> None:
    splits = {
        split: load(f"sums:?max=9&split={split}&held_out=20&warm=10&seed=5") for split in ("train", "val", "warm")
    }
    assert {split: len(prompts) for split, prompts in splits.items()} == {"train": 70, "val": 20, "warm": 10}
    texts = [prompt.text for prompts in splits.values() for prompt in prompts]
    assert sorted(texts) == sorted(f"{a}+{b}=" for a in range(10) for b in range(10))
    for prompt in splits["train"]:
        a, b = prompt.text.rstrip("=").split("+")
        assert prompt.answer == str(int(a) + int(b))
    assert load("sums:?max=9&split=val&held_out=20&warm=10&seed=5") == splits["val"]
    assert load("sums:?max=9&split=val&held_out=20&warm=10&seed=6") != splits["val"]
    assert splits["val"][3].uid == "sums:?max=9&split=val&held_out=20&warm=10&seed=5:3"
    assert splits["val"][3].source == "sums"
    assert len(load("sums:?size=50")) == 50


def test_reasoning_gym_rows_are_fixed_plain_and_disjoint_between_neighbouring_seeds() -> None:
    prompts = load(CHAIN_SUM)
    assert prompts == load(CHAIN_SUM)
    assert len(prompts) == 20
    first = prompts[0]
    assert first.source == "reasoning_gym/chain_sum"
    assert first.uid == f"{CHAIN_SUM}:0"
    assert first.extra["reasoning_gym"]["task"] == "chain_sum"
    assert json.loads(json.dumps(first.extra)) == first.extra
    long = "reasoning_gym:chain_sum?size=20&min_digits=4&seed="
    assert not {p.text for p in load(f"{long}1")} & {p.text for p in load(f"{long}2")}
    only_plus = 'reasoning_gym:basic_arithmetic?size=5&operators=["+"]&allow_negation=false&allow_parentheses=false'
    assert all("+" in p.text and "*" not in p.text for p in load(only_plus))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("sum:?max=9", "unknown source 'sum'; did you mean 'sums'?"),
        ("sums:?mx=9", "unknown parameter 'mx'; did you mean 'max'?"),
        ("sums:?max=-1", "max is '-1'; it must be a whole number from 1 to 999"),
        ("sums:?max=9&split=test", "split is 'test'; use one of train, val, warm"),
        ("sums:?max=9&split=warm", "the split 'warm' is empty"),
        ("sums:?max=9&held_out=101", "held_out is '101'"),
        ("sums:?max=9&max=8", "max is given twice"),
        ("sums:?max", "'max' is no parameter"),
        ("sums:easy", "sums has no tasks"),
        ("reasoning_gym:chain_sums", "no task 'chain_sums'; did you mean 'chain_sum'"),
        ("reasoning_gym:", "Tasks: ab, "),
        ("reasoning_gym:chain_sum?terms=2", "unknown parameter 'terms'"),
        ("reasoning_gym:chain_sum?min_terms=9", "refuses the parameters: max_terms must be >= min_terms"),
        ("reasoning_gym:chain_sum?size=0", "size is '0'"),
        ("reasoning_gym:graph_color?size=1", "no single answer"),
    ],
)
def test_a_source_that_cannot_be_made_is_named_with_the_reason(source: str, reason: str) -> None:
    message = fault(source)
    assert source in message
    assert reason in message


def test_a_missing_reasoning_gym_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert "pip install reasoning-gym" in fault(CHAIN_SUM)


def test_importing_the_data_sets_is_free_of_torch_and_pyarrow() -> None:
    code = "import sys, moonshift.core.datasets; print({'torch', 'pyarrow', 'reasoning_gym'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
