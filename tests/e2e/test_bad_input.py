"""What a person gets wrong: one clear message, a code, no traceback, nothing half-written."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def train(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "moonshift.flows.cli", "train", *arguments, "--plain"],
        env={**os.environ, "MOONSHIFT_HOME": str(tmp_path / "home")}, cwd=tmp_path,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "Traceback" not in done.stderr + done.stdout
    assert not (tmp_path / "home" / "ledger.db").exists() and not (tmp_path / "home" / "runs").exists()
    assert not list((tmp_path / "home").glob("services/clients/*"))
    return done


def quickstart(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return train(tmp_path, str(ROOT / "examples" / "quickstart.yaml"), *overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_files=missing.jsonl", ["missing.jsonl"]),
        ("trainer.totl_epochs=2", ["trainer.totl_epochs", "trainer.total_epochs"]),
        ("actor_rollout_ref.model.path=nowhere/model", ["nowhere/model"]),
        ("actor_rollout_ref.model.path=broken", ["broken", "model.safetensors"]),
        ("data.train_files=no_text.jsonl", ["no_text.jsonl", "row 1", "prompt"]),
        ("data.train_files=empty.jsonl", ["empty.jsonl"]),
        ("reward.function=raises.py:score", ["raises.py", "boom"]),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=24", ["ppo_mini_batch_size=64", "64 prompts a step"]),
    ],
)
def test_the_message_names_what_is_wrong(tmp_path: Path, override: str, expected: list[str]) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": None, "answer": "3"}]
    (tmp_path / "no_text.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "raises.py").write_text("def score(sample):\n    raise KeyError('boom')\n")
    _break_a_model(tmp_path / "broken")
    done = quickstart(tmp_path, override)
    assert done.returncode == 2, done.stderr
    for word in expected:
        assert word in done.stderr


def _break_a_model(folder: Path) -> None:
    from moonshift.core.training.char_llama import build_char_llama

    build_char_llama(folder, seed=0, settings={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2})
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def test_an_occupied_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "moonshift.flows.cli", "server", "start", "--port", port],
            env={**os.environ, "MOONSHIFT_HOME": str(tmp_path / "home")}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 1
    assert port in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "home").glob("services/*.json"))


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    done = train(tmp_path, "nothing.yaml")
    assert done.returncode == 2
    assert "nothing.yaml" in done.stderr


def test_a_home_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "moonshift.flows.cli", "train", "x.yaml"],
        env={**os.environ, "MOONSHIFT_HOME": str(tmp_path / "home")}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "MOONSHIFT_HOME" in done.stderr and "Traceback" not in done.stderr


def test_the_version_is_quick_to_ask() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", "import moonshift; print(moonshift.__version__)"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert shown.stdout.strip() == "0.1.0"
