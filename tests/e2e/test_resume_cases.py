"""A run that was killed and is then asked for twice at once: one goes on, to the same state; the other one skips."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .conftest import QUICKSTART, SMALL, command, environment_of, rows, start, wait_for_stage

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def asked_twice(
    server_home: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str], list[int], dict[str, str]]:
    """Home, what the two printed, their exit codes, and the digests of what was committed before the kill."""
    home = tmp_path_factory.mktemp("twice") / "home"
    killed = start(home, server_home)
    wait_for_stage(home, "step-0003/score", killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait(30)
    before = dict(rows(home, "select step || ' ' || name, digest from stages"))
    resume = command("train", str(QUICKSTART), *SMALL, "--plain", "--resume")
    both = [
        subprocess.Popen(
            resume, env=environment_of(home, server_home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=500)[0] for process in both]
    return home, printed, [process.returncode for process in both], before


@pytest.mark.case("O03")
def test_of_two_flows_of_one_run_one_trains_and_one_is_skipped(
    asked_twice: tuple[Path, list[str], list[int], dict[str, str]], server_home: dict[str, str]
) -> None:
    home, printed, codes, _ = asked_twice
    assert sorted(codes) == [0, 1], printed
    refused = printed[codes.index(1)]
    assert "is owned by process" in refused and "Traceback" not in refused
    assert rows(home, "select state from runs") == [("COMPLETED",)]
    assert [state for (state,) in rows(home, "select state from attempts order by number")] == ["CRASHED", "COMPLETED"]
    doubled = "select count(*) from (select 1 from metrics_outbox group by key, step having count(*) > 1)"
    assert rows(home, doubled) == [(0,)]
    states = _flow_states(server_home)
    assert ("Skipped", "CANCELLED") in states
    # the killed one's flow run is brought into line too
    assert [state for name, state in states if name != "Skipped"][-2:] == ["CRASHED", "COMPLETED"]


def _flow_states(server_home: dict[str, str]) -> list[tuple[str, str]]:
    """Name and type of all flow runs' states, oldest first."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: server_home["PREFECT_API_URL"]}), get_client(sync_client=True) as client:
        found = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_ASC)
        return [(run.state.name or "", run.state.type.value) for run in found if run.state is not None]


@pytest.mark.case("K08")
def test_every_file_of_the_last_checkpoint_is_that_of_the_unbroken_run(
    asked_twice: tuple[Path, list[str], list[int], dict[str, str]], unbroken: tuple[Path, Any]
) -> None:
    """Weights, Adam's moments and step, learning rate, every RNG, position in the data, policy version."""
    last = Path("runs/quickstart-0001/checkpoints/step-000005")
    manifests = [json.loads((home / last / "manifest.json").read_text()) for home in (asked_twice[0], unbroken[0])]
    assert {"optimizer.safetensors", "rng.safetensors", "state.json", "sampler.json"} <= set(manifests[0]["files"])
    assert manifests[0]["files"] == manifests[1]["files"]


@pytest.mark.case("K11")
def test_finished_rollouts_are_used_and_each_prompt_is_trained_once(
    asked_twice: tuple[Path, list[str], list[int], dict[str, str]], unbroken: tuple[Path, Any]
) -> None:
    home, _, _, before = asked_twice
    after = dict(rows(home, "select step || ' ' || name, digest from stages"))
    assert "3 rollout" in before and "3 update" not in before
    assert {name: after[name] for name in before} == before
    trained = "select step, epoch, uid, sample_index, reward from samples order by 1, 2, 3, 4"
    assert rows(home, trained) == rows(unbroken[0], trained)
