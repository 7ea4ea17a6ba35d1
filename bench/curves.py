"""Reward curves of a config over several seeds, one of them killed half-way and resumed: `python -m bench.curves`.

Each run is the command that a user types, with its Prefect flow, Ray cluster, ledger and MLflow store, in a home of its
own. What MLflow holds afterwards is written as JSON (`run`), and drawn from there (`draw`): both need not happen on one
machine.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.workload import provenance

app = typer.Typer(no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
METRICS = (
    *("val/score/mean", "critic/score/mean", "actor/entropy", "response_length/mean", "actor/grad_norm"),
    *("training/rollout_probs_diff_mean", "training/rollout_log_probs_diff_mean", "rollout_corr/kl"),
    *("timing_s/gen", "timing_s/generate", "timing_s/weight_sync", "timing_s/update_actor", "timing_s/step"),
    *("perf/throughput", "perf/time_per_step", "timing_s/reward_tail"),
)
"""MLflow's metrics in the export; those that a run does not have are left out"""
SUMMARY = ("state", "steps", "optimizer_steps", "first_reward_s", "wall_s", "attempts")


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="The runs' YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value pairs put over the file.")] = None,
    seeds: Annotated[str, typer.Option(help="By commas; a run for each.")] = "0,1,2",
    kill: Annotated[int, typer.Option(help="Seed of the run that is killed half-way and resumed; -1: none.")] = 2,
    out: Annotated[Path, typer.Option(help="JSON file; runs that it holds of other seeds stay.")] = Path("curves.json"),
) -> None:
    """Train once for each seed; exit 1 where a run does not complete."""
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"runs": {}}
    found |= provenance() | {"config": str(config), "overrides": overrides or []}
    home = Path(os.environ.setdefault("MOONSHIFT_HOME", str(Path.cwd() / ".moonshift")))
    for seed in seeds.split(","):
        found["runs"][seed] = one_run(config, overrides or [], int(seed), int(seed) == kill, home)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(found["runs"][seed]["summary"]), flush=True)
    raise typer.Exit(any(one["summary"]["state"] != "COMPLETED" for one in found["runs"].values()))


def one_run(config: Path, overrides: list[str], seed: int, kill: bool, home: Path) -> dict[str, Any]:
    """Train with a seed, to the end; returns the run's summary and what MLflow holds of it."""
    summary = home / f"summary-{seed}.json"
    home.mkdir(parents=True, exist_ok=True)
    given = [str(config), *overrides, f"run.name=curve-{seed}", f"run.seed={seed}"]
    command = [sys.executable, "-m", "moonshift.flows.cli", "train", *given, "--plain", "--summary", str(summary)]
    log = home / f"curve-{seed}.log"
    started = time.time()
    killed_at = _until_half(command, log) if kill else None
    with log.open("a", encoding="utf-8") as written:
        ended = subprocess.run([*command, "--resume"], stdout=written, stderr=subprocess.STDOUT, check=False)
    if not summary.exists():
        raise typer.BadParameter(
            f"seed {seed} ended with {ended.returncode}; its last lines:\n{log.read_text()[-3000:]}"
        )
    told = json.loads(summary.read_text(encoding="utf-8"))
    seen = {"killed_at_step": killed_at, "all_attempts_s": time.time() - started}
    return {
        "summary": {key: told[key] for key in SUMMARY if key in told} | seen,
        "metrics": histories(home, told["mlflow_run_id"]),
    }


def _until_half(command: list[str], log: Path) -> int:
    """Let a run go until half of its steps are shown, then SIGKILL it; returns that step."""
    with log.open("w", encoding="utf-8") as written:
        process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
    while process.poll() is None:
        shown = [line.split()[1] for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("step ")]
        steps = [tuple(map(int, one.split("/"))) for one in shown if "/" in one]
        if steps and 2 * steps[-1][0] >= steps[-1][1]:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return steps[-1][0]
        time.sleep(0.2)
    raise typer.BadParameter(f"The run to be killed ended before ({process.returncode}):\n{log.read_text()[-3000:]}")


def histories(home: Path, run_id: str) -> dict[str, list[list[float]]]:
    """By metric [step, value] in the order of steps, as MLflow's store in `home` has them."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{home / 'mlflow.db'}")
    found = {key: client.get_metric_history(run_id, key) for key in METRICS}
    return {
        key: sorted([float(point.step), float(point.value)] for point in points)
        for key, points in found.items()
        if points
    }


@app.command()
def draw(
    file: Annotated[Path, typer.Argument(help="What `run` wrote.")],
    out: Annotated[Path, typer.Option(help="PNG file.")],
) -> None:
    """Held-out score and training reward of every seed over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, key, title in zip(axes, ("val/score/mean", "critic/score/mean"), ("held-out", "training"), strict=True):
        for seed, one in runs.items():
            steps, values = zip(*one["metrics"][key], strict=True)
            killed = one["summary"]["killed_at_step"]
            label = f"seed {seed}" + (f", killed at step {killed}, resumed" if killed else "")
            axis.plot(steps, values, label=label, marker="o" if len(steps) < 10 else None)
        axis.set(title=f"mean reward, {title}", xlabel="step", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    print(f"wrote {out}")


if __name__ == "__main__":
    app()
