"""TRL and the product on the same work, in turn, each in a process of its own: `python -m bench.against_trl`.

Writes what both reached into one JSON file, `{"1.7b": {…}, "trl-1.7b": {…}, "commit", "date", …}`; other keys that the
file holds, such as another shape's, stay.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.workload import SHAPES

COMPARED = ("step_s", "rollout_s", "generate_s", "sync_s", "update_s", "tokens_per_s", "mfu", "step_mfu", "peak_gib")
KEPT = (*COMPARED, "log_prob_s", "advantage_s", "reserved_gib", "device_gib")


def measured(module: str, options: list[str], folder: Path) -> dict[str, Any]:
    """What one bench writes, from a process of its own whose output is shown as it comes."""
    out = folder / f"{module}.json"
    command = [sys.executable, "-m", module, *options, "--out", str(out)]
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)
    return json.loads(out.read_text(encoding="utf-8"))


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of one bench: the means, the limits, how it was set and how it started."""
    means = {name: float(f"{found['mean'][name]:.6g}") for name in KEPT if name in found["mean"]}
    mismatch = {key: value for key, value in found["mean"].items() if key.startswith("training/rollout")}
    limit = {name: float(f"{value:.6g}") for name, value in found.get("limits", {}).items()}
    rest = {key: found[key] for key in ("engine", "settings", "start", "versions")}
    return means | mismatch | rest | ({"limits": limit} if limit else {}) | {"steps": len(found["steps"])}


def merge(file: Path, values: dict[str, Any]) -> None:
    """Put `values` over what the JSON file holds."""
    held = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(held | values, indent=2) + "\n", encoding="utf-8")


def show(shape: str, ours: dict[str, Any], theirs: dict[str, Any] | None) -> None:
    """Both in one table, with the limits."""
    table = Table("", "ours", "limit", "TRL", "TRL / ours", title=shape)
    for name in COMPARED:
        value, limit = ours[name], ours["limits"].get(name)
        other = (theirs or {}).get(name)
        table.add_row(
            name,
            f"{value:.4g}",
            "" if limit is None else f"{limit:.4g}",
            "" if other is None else f"{other:.4g}",
            f"{other / value:.2f}" if other and value else "",
        )
    Console(width=100).print(table)


def main(
    out: Annotated[Path, typer.Option(help="JSON file, added to where it is there.")],
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "1.7b",
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 2,
    gradient_checkpointing: Annotated[bool, typer.Option(help="TRL's; ours is set by --ours.")] = True,
    gpu_memory_utilization: Annotated[float, typer.Option(help="vLLM's share of the GPU's memory, for both.")] = 0.4,
    micro_batch: Annotated[int, typer.Option(help="TRL's samples a pass.")] = 32,
    weights: Annotated[str, typer.Option(help="TRL's trained weights: float32, as ours, or bfloat16.")] = "float32",
    dtype: Annotated[str, typer.Option(help="Of the passes of both.")] = "bfloat16",
    vllm: Annotated[bool, typer.Option(help="Off: Transformers generates for both.")] = True,
    trl: Annotated[bool, typer.Option(help="Off: ours alone.")] = True,
    ours: Annotated[str, typer.Option(help="Further options of grpo_step, in one text.")] = "",
    theirs: Annotated[str, typer.Option(help="Further options of trl_step, in one text.")] = "",
    work: Annotated[Path, typer.Option(help="Models and stages go here.")] = Path("/tmp/moonshift-bench"),
) -> None:
    """Measure TRL first, then ours, and write both."""
    both = ["--shape", shape, "--steps", str(steps), "--warmup", str(warmup), "--dtype", dtype, "--work", str(work)]
    both += ["--gpu-memory-utilization", str(gpu_memory_utilization)]
    recompute = "--gradient-checkpointing" if gradient_checkpointing else "--no-gradient-checkpointing"
    other = [*both, "--micro-batch", str(micro_batch), "--weights", weights, recompute, *theirs.split()]
    own = [*both, *ours.split()]
    if not vllm:
        other, own = [*other, "--no-vllm"], [*own, "--engine", "transformers"]
    with tempfile.TemporaryDirectory() as folder:
        trl_found = measured("bench.trl_step", other, Path(folder)) if trl else None
        if trl_found is not None:  # kept even where ours fails
            merge(out, {f"trl-{shape}": summary(trl_found)})
        found = measured("bench.grpo_step", own, Path(folder))
    merge(out, {shape: summary(found)} | {key: found[key] for key in ("commit", "date", "device")})
    show(shape, summary(found), trl_found and summary(trl_found))


if __name__ == "__main__":
    typer.run(main)
