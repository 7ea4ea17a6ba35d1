"""What a run came to, read from the ledger: the summary for scripts and the curve as a picture."""

import time
from pathlib import Path
from typing import Any

import psutil

from . import snapshots
from .attempt import Attempt
from .completion import check_complete
from .home import run_folder
from .ledger import CheckpointState, Ledger, RunRecord
from .origin import origin_of
from .tracking import Artifact

REWARD = "critic/score/mean"
ACCURACY = "val/score/mean"


def finish(attempt: Attempt) -> dict[str, Any]:
    """Check that the run is whole, fingerprint its weights, draw its curve and hand the artifacts to MLflow.

    Raises:
        StageError: when fewer optimizer steps were taken than planned.
    """
    check_complete(attempt)
    sha256 = attempt.roles.model.weights_sha256()
    attempt.ledger.event(attempt.run_id, "weights", {"sha256": sha256}, attempt.lease.attempt_id)
    picture = attempt.folder / "reward.png"
    draw_curve(attempt.ledger, attempt.run_id, picture)
    last = snapshots.folder_of(attempt.checkpoints, attempt.plan.steps)
    artifacts = [Artifact(path=picture, folder="")]
    for step in snapshots.steps_on_disk(attempt.checkpoints):
        folder = snapshots.folder_of(attempt.checkpoints, step)
        artifacts.append(Artifact(path=folder / snapshots.MANIFEST, folder=f"checkpoints/{folder.name}"))
    if attempt.config.tracking.log_weights:
        artifacts.append(Artifact(path=last / "model", folder=f"checkpoints/{last.name}/model"))
    attempt.tracker.artifacts = artifacts
    return summarize(attempt.ledger, attempt.run_id)


def summarize(ledger: Ledger, run_id: str) -> dict[str, Any]:
    """The run in numbers; a value that does not exist (yet) is None."""
    run = ledger.run(run_id)
    origin = origin_of(ledger, run)
    rewards = ledger.metric_series(run_id, REWARD)
    accuracies = ledger.metric_series(run_id, ACCURACY)
    optimizer_steps = ledger.metric_series(run_id, "training/optimizer_steps")
    kept = [record for record in ledger.checkpoints(run_id) if record.state == CheckpointState.KEPT]
    weights = ledger.events(run_id, "weights")
    return {
        "run_id": run_id,
        "state": str(run.state),
        "steps": ledger.last_step(run_id),
        "optimizer_steps": int(optimizer_steps[-1][1]) if optimizer_steps else origin.optimizer_steps,
        "reward_first": rewards[0][1] if rewards else None,
        "reward_last": rewards[-1][1] if rewards else None,
        "eval_before": accuracies[0][1] if accuracies and accuracies[0][0] == run.base_step else None,
        "eval_after": accuracies[-1][1] if accuracies and accuracies[-1][0] > run.base_step else None,
        "wall_s": time.time() - psutil.Process().create_time(),
        "first_reward_s": _first_reward_s(ledger, run),
        "checkpoint": str(run_folder(run_id) / max(kept, key=lambda record: record.step).path) if kept else None,
        "weights_sha256": weights[-1].detail["sha256"] if weights else None,
        "mlflow_run_id": run.mlflow_run_id,
        "parent_run_id": run.parent_run_id,
        "base_step": run.base_step,
        "attempts": len(ledger.attempts(run_id)),
    }


def _first_reward_s(ledger: Ledger, run: RunRecord) -> float | None:
    """Seconds from the start of the run's first process to its first training reward."""
    started = [event.detail["process_started"] for event in ledger.events(run.run_id, "attempt")]
    scored = ledger.stage(run.run_id, run.base_step + 1, "score")
    return scored.committed_at - started[0] if scored and started else None


def draw_curve(ledger: Ledger, run_id: str, picture: Path) -> None:
    """Training reward a step, and held-out score, as PNG."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    figure = Figure(figsize=(7, 3.6), dpi=140, layout="constrained")
    axes = figure.subplots()
    for key, label, style in ((REWARD, "training reward", "-"), (ACCURACY, "held-out score", "o--")):
        series = ledger.metric_series(run_id, key)
        if series:
            axes.plot(*zip(*series, strict=True), style, label=label, linewidth=1.5, markersize=4)
    axes.set(xlabel="step", ylabel="mean score", title=run_id)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture)
