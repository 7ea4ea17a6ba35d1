"""Nothing of a run's folder is executed, and no secret is written down."""

import ast
import logging
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moonshift.core.config import load_config, to_json, to_yaml, without_secrets
from moonshift.core.errors import CheckpointError, ServiceError
from moonshift.infra import snapshots
from moonshift.infra.ledger import RunState
from moonshift.infra.tracking import Tracker, sync

from .small_run import RUN, Make
from .test_snapshots import make

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("core", "infra", "tasks", "flows")
PICKLES = ("optimizer.pt", "rng_state.pth", "data.pt", "cache/reward.pkl")
SECRETS = ("hf_SECRET1", "SECRET2", "SECRET3")


class Payload:
    """Makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.case("S01")
@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_that_was_put_into_a_checkpoint_is_named_and_not_loaded(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "pwned"
    checkpoints = tmp_path / "checkpoints"
    make(checkpoints, 1)
    place = make(checkpoints, 2)
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(CheckpointError, match=f"{Path(name).name}"):
        snapshots.verify(place)
    found = snapshots.newest(checkpoints)
    assert found is not None and found[1].step == 1
    # also where the manifest was made to fit
    (place / snapshots.MANIFEST).unlink()
    snapshots.seal(place, step=2, identity="i")
    with pytest.raises(CheckpointError, match=f"{Path(name).name}"):
        snapshots.verify(place)
    assert not marker.exists()


@pytest.mark.case("S01")
def test_the_code_has_no_loader_that_runs_what_it_reads() -> None:
    found = []
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found += [f"{file.relative_to(ROOT)}: {ast.unparse(node)}" for node in ast.walk(tree) if _runs_code(node)]
    assert found == []


def _runs_code(node: ast.AST) -> bool:
    """Pickle and its kin, `torch.load`, numpy with pickles, YAML's full loaders."""
    modules = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] in modules for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] in modules
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    return (
        called in ("torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load")
        or keywords.get("allow_pickle") == "True"
        or keywords.get("weights_only") == "False"
    )


@pytest.mark.case("S01")
@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from dill import load", "torch.load(x)", "torch.load(x, weights_only=False)",
        "np.load(x, allow_pickle=True)", "yaml.load(x)",
    ],
)  # fmt: skip
def test_the_search_for_loaders_sees_them(line: str) -> None:
    assert any(_runs_code(node) for node in ast.walk(ast.parse(line)))


@pytest.mark.case("S03")
def test_no_secret_reaches_ledger_mlflow_checkpoint_logs_or_errors(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    kwargs = {"hub_token": SECRETS[0], "env": {"WANDB_API_KEY": SECRETS[2]}, "use_cls_token": True, "max_tokens": 4}
    uri = f"http://u:{SECRETS[1]}@127.0.0.1:9"
    small = make(reward__kwargs=kwargs, tracking__mlflow_uri=uri, tracking__flush_timeout_s=5)
    with caplog.at_level(logging.DEBUG):
        small.begin()
        away = Tracker(small.ledger, small.lease, small.config, small.home)
        away.start()
        while away.error is None:
            time.sleep(0.05)
        assert not away.close(RunState.FAILED)
        small.ledger.release(small.lease, RunState.FAILED, away.error)
        with pytest.raises(ServiceError) as refused:
            sync(small.ledger, RUN, small.home, uri=uri)
        assert sync(small.ledger, RUN, small.home, uri=f"sqlite:///{small.home / 'mlflow.db'}") > 0
    stored = to_yaml(small.config)
    (small.folder / "config.yaml").write_text(stored)
    seen = [caplog.text, str(refused.value), repr(small.config), stored, to_json(small.config, masked=True)]
    assert "metrics not sent to MLflow at http://u:********@127.0.0.1:9" in caplog.text
    for secret in SECRETS:
        assert [text for text in seen if secret in text] == []
        assert [path for path in small.home.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()] == []
    assert "use_cls_token: true" in stored and "max_tokens: 4" in stored


@pytest.mark.case("S03")
def test_a_secret_of_the_command_line_is_no_parameter_of_the_flow_run() -> None:
    environ: dict[str, str] = {}
    uri = f"tracking.mlflow_uri=http://u:{SECRETS[1]}@h:5000"
    given = ("run.seed=3", uri, "data.max_prompt_length=64")
    assert without_secrets(given, environ) == ("run.seed=3", "data.max_prompt_length=64")
    assert environ == {"MOONSHIFT__TRACKING__MLFLOW_URI": f"http://u:{SECRETS[1]}@h:5000"}
    code = {"data.train_files": "sums:?max=9", "actor_rollout_ref.model.path": "builtin:char-llama"}
    loaded = load_config(None, without_secrets(given, environ), environ=environ, code=code).config
    assert loaded.tracking.mlflow_uri == f"http://u:{SECRETS[1]}@h:5000" and loaded.run.seed == 3


@pytest.mark.case("S03")
@pytest.mark.parametrize("command", ["config", "plan"])
def test_a_wrong_config_is_reported_without_its_secrets(command: str, moonshift_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"tracking: {{mlflow_uri: 'http://u:{SECRETS[1]}@h:5000', flush_timeout_s: -1, hub_token: {SECRETS[0]}}}\n"
        f"reward: {{kwargs: {{env: {{WANDB_API_KEY: {SECRETS[2]}}}}}, num_workers: none}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "moonshift.flows.cli", command, str(file), "--debug"],
        env={**os.environ, "MOONSHIFT_HOME": str(moonshift_home)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0 and "tracking.hub_token" in done.stdout + done.stderr
    assert "SECRET" not in done.stdout + done.stderr
