"""`moonshift check-data` as a person meets it: tables or JSON, the exit code, and nothing started."""

import json
import os
import subprocess
from pathlib import Path


def check(command: list[str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*command, "check-data", "actor_rollout_ref.model.path=builtin:char-llama", *arguments],
        env={**os.environ, "MOONSHIFT_HOME": str(folder / "home")}, cwd=folder,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "Traceback" not in done.stderr + done.stdout
    assert not (folder / "home" / "ledger.db").exists()
    return done


def test_every_row_is_accounted_for_and_the_exit_code_says_whether_a_run_would_start(
    tmp_path: Path, moonshift_command: list[str]
) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}] * 3 + [
        {"prompt": None, "answer": "2"},
        {"prompt": "12345+1=", "answer": "6"},
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("data.train_files=d.jsonl", "data.train_batch_size=2", "data.max_prompt_length=6")
    refused = check(moonshift_command, tmp_path, *given)
    assert refused.returncode == 2
    shown = " ".join(refused.stdout.split())
    for words in (
        "rows 5", "used 3", "dropped, prompt: null prompt 1", "dropped, prompt: longer than data.max_prompt_length 1",
        "turns user: 4 rows, such as d.jsonl:0 1+1=", "1 rows cannot be used; mend them or set data.on_bad_row=skip",
        "1 prompts are longer than data.max_prompt_length=6", "row 3, column prompt: null prompt", "tokens, max 4",
    ):  # fmt: skip
        assert words in shown, words
    taken = check(moonshift_command, tmp_path, *given, "data.on_bad_row=skip", "data.on_overlong=left", "--json")
    assert taken.returncode == 0
    found = json.loads(taken.stdout)["train"]
    assert (found["rows"], found["used"], found["dropped"], found["truncated"], found["duplicates"]) == (5, 4, 1, 1, 2)
    assert found["refused"] == [] and found["histogram"] == [[4, 4, 3], [5, 5, 0], [6, 6, 1]]


def test_a_file_that_is_not_there_is_named(tmp_path: Path, moonshift_command: list[str]) -> None:
    done = check(moonshift_command, tmp_path, "data.train_files=nothing.jsonl")
    assert done.returncode == 2 and "nothing.jsonl: no such file" in done.stderr
