"""`moonshift plan` and `moonshift config` as a person calls them."""

import json
import subprocess
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
WANTED = {
    "samples_per_step", "rollout_replicas", "prompts_per_replica", "samples_per_replica", "dp_size",
    "samples_per_rank_per_mini_batch", "log_prob_micro_batches", "optimizer_steps_per_step",
}  # fmt: skip


def call(command: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_has_a_legal_plan(moonshift_command: list[str], example: Path) -> None:
    shown = call(moonshift_command, "plan", str(example), "--json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["legal"] and found.keys() >= WANTED
    assert call(moonshift_command, "plan", str(example)).returncode == 0


def test_an_illegal_plan_ends_with_code_2_and_all_faults(moonshift_command: list[str]) -> None:
    wrong = ("trainer.n_gpus_per_node=7", "actor_rollout_ref.actor.ppo_mini_batch_size=24")
    shown = call(moonshift_command, "plan", str(EXAMPLES[0]), *wrong)
    assert shown.returncode == 2 and "Traceback" not in shown.stderr
    assert shown.stderr.count("Nearest legal") >= 2
    found = call(moonshift_command, "plan", str(EXAMPLES[0]), *wrong, "--json")
    assert found.returncode == 2
    assert json.loads(found.stdout)["legal"] is False and len(json.loads(found.stdout)["faults"]) >= 2


def test_the_drawing_and_the_warning_are_shown(moonshift_command: list[str]) -> None:
    keys = (
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=256",
    )
    shown = call(moonshift_command, "plan", str(EXAMPLES[0]), *keys, "--gpu-memory", "0.001")
    assert shown.returncode == 0, shown.stderr
    assert "R1.1" in shown.stdout and "D3 sp0" in shown.stdout and "WARNING" in shown.stdout


def test_config_names_the_place_of_each_value_and_hides_secrets(moonshift_command: list[str]) -> None:
    keys = ("trainer.save_freq=7", "tracking.mlflow_uri=http://me:SECRET@host", "trainer.project_name=mine")
    shown = call(moonshift_command, "config", str(EXAMPLES[0]), *keys)
    assert shown.returncode == 0 and "SECRET" not in shown.stdout
    assert "command line" in shown.stdout and f"{EXAMPLES[0].name}:" in shown.stdout
    found = json.loads(call(moonshift_command, "config", str(EXAMPLES[0]), *keys, "--json").stdout)
    assert found["values"]["trainer.save_freq"]["value"] == 7
    assert found["values"]["trainer.save_freq"]["overrode"]
    assert found["values"]["tracking.experiment"]["value"] == "mine"
    assert [item["key"] for item in found["verl_keys"]] == ["trainer.project_name"]


def test_nothing_is_made_by_looking(moonshift_command: list[str], tmp_path: Path) -> None:
    subprocess.run([*moonshift_command, "plan", str(EXAMPLES[0])], cwd=tmp_path, check=True, capture_output=True)
    assert list(tmp_path.iterdir()) == []
