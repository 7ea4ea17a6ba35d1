"""Warm GRPO steps of the product's model worker, stage by stage, beside their limits: `python -m bench.grpo_step`.

The worker is called in this process, as its Ray actor calls it; there is no Prefect and no Ray. Rewards are random
numbers, written as the reward stage writes them. Responses have exactly as many tokens as the shape says, because the
order names no stop id (`SamplingParams.stop_ids` is empty): every id can be drawn and none ends a response.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.workload import (
    SHAPES,
    Machine,
    Shape,
    begin_peak,
    described,
    limits,
    mean,
    model_folder,
    peak_memory,
    prompts,
    provenance,
    rates,
    synchronize,
)
from moonshift.core.config import load_config, to_json
from moonshift.core.config.schema import Config
from moonshift.core.plan import make_plan
from moonshift.core.training.advantages import Stages
from moonshift.core.types import RolloutEngine, SamplingParams
from moonshift.infra.workers.model import ModelWorker
from moonshift.infra.workers.orders import RolloutOrder
from moonshift.infra.workers.reward import write_scores

SHOWN = (
    *("step_s", "rollout_s", "generate_s", "sync_s", "score_s", "log_prob_s", "advantage_s", "update_s"),
    *("tokens_per_s", "mfu", "step_mfu", "peak_gib", "reserved_gib", "device_gib"),
)
"""rows of the table; the JSON has all that the product reports too"""


class TimedWorker(ModelWorker):
    """Says how long the engine took to start, apart from the loading of the model."""

    engine_start_s = 0.0

    def _engine(self, folder: Path) -> RolloutEngine:
        started = time.perf_counter()
        engine = super()._engine(folder)
        self.engine_start_s = time.perf_counter() - started
        return engine


@dataclass
class Clock:
    """Seconds of named stages, the GPU's work included."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        synchronize()
        started = time.perf_counter()
        yield
        synchronize()
        self.seconds[name] = time.perf_counter() - started


def settings(shape: Shape, steps: int, values: dict[str, Any], overrides: list[str]) -> Config:
    """The run's config: the workload, then `values`; a key of `overrides` (key=value) replaces both."""
    code = {
        "data.train_files": "sums:?max=9",  # not read: the bench brings its own prompts
        "data.train_batch_size": shape.prompts,
        "data.max_prompt_length": shape.prompt_tokens,
        "data.max_response_length": shape.response_tokens,
        "actor_rollout_ref.model.path": "builtin:char-llama",  # not read: the worker is given a folder
        "actor_rollout_ref.rollout.n": shape.samples,
        "actor_rollout_ref.actor.ppo_mini_batch_size": shape.prompts,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "trainer.total_training_steps": steps,
    }
    replaced = {override.partition("=")[0] for override in overrides}
    kept = {key: value for key, value in (code | values).items() if key not in replaced}
    return load_config(None, overrides, environ={}, code=kept).config


def order(shape: Shape, step: int) -> RolloutOrder:
    """The step's prompts; no stop id, so each response is `response_tokens` long."""
    return RolloutOrder(
        prompt_ids=prompts(shape, step),
        uids=[f"{step}:{index}" for index in range(shape.prompts)],
        epochs=[0] * shape.prompts,
        seeds=[step * shape.sequences + index for index in range(shape.sequences)],
        params=SamplingParams(
            n=shape.samples,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            max_new_tokens=shape.response_tokens,
            stop_ids=(),
        ),
    )


Around = Callable[[str, Callable[[], dict[str, float]]], dict[str, float]]


def plainly(_: str, stage: Callable[[], dict[str, float]]) -> dict[str, float]:
    return stage()


def run_step(worker: ModelWorker, shape: Shape, step: int, work: Path, around: Around = plainly) -> dict[str, float]:
    """One step: seconds of its stages, peak memory from the end of the rollout on, and the product's metrics."""
    folder = work / "stages"
    stages = Stages(rollout=str(folder / "rollout"), score=str(folder / "score"), log_probs=str(folder / "log_probs"))
    redo = str(folder / "advantage")
    ordered, clock = order(shape, step), Clock()
    scores = torch.rand(shape.sequences, generator=torch.Generator().manual_seed(step)).tolist()
    with clock("step_s"):
        with clock("rollout_s"):
            metrics = around("rollout", lambda: worker.rollout(ordered, stages.rollout))
        begin_peak()
        with clock("score_s"):
            write_scores({"score": scores}, Path(stages.score))
        with clock("log_prob_s"):
            metrics |= worker.log_probs(stages.rollout, stages.log_probs)
        with clock("advantage_s"):
            metrics |= worker.advantage(stages, redo, None)
        with clock("update_s"):
            metrics |= around("update", lambda: worker.update(redo, step))
    memory = peak_memory()
    shutil.rmtree(folder)
    assert metrics["response_length/min"] == shape.response_tokens, "a response ended early"
    named = {"generate_s": metrics["timing_s/generate"], "sync_s": metrics["timing_s/weight_sync"]}
    return clock.seconds | named | memory | metrics


def profiled(name: str, stage: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Runs a stage under torch's profiler and prints the 25 kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=kinds) as found:
        metrics = stage()
        synchronize()
    print(f"profile of {name}")
    order_by = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order_by, row_limit=25, max_name_column_width=70))
    return metrics


def show(found: dict[str, Any]) -> None:
    """The mean of the steps beside the limits, and the gap between both engines."""
    table = Table("", "mean", "limit", "times the limit", "each step", title=f"{found['shape']}: {found['engine']}")
    average, limit, steps = found["mean"], found["limits"], found["steps"]
    for name in SHOWN:
        bound = limit.get(name)
        ratio = f"{average[name] / bound:.2f}" if bound else ""
        each = " ".join(f"{step[name]:.4g}" for step in steps)
        table.add_row(name, f"{average[name]:.4g}", "" if bound is None else f"{bound:.4g}", ratio, each)
    console = Console(width=120)
    console.print(table)
    mismatch = {key: value for key, value in average.items() if key.startswith(("training/rollout", "rollout_corr"))}
    for key, value in (found["start"] | mismatch).items():
        console.print(f"{key} {value:.4g}")


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "1.7b",
    engine: Annotated[str, typer.Option(help="vllm | transformers.")] = "vllm",
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 2,
    max_tokens: Annotated[int, typer.Option(help="Cap of a micro-batch's tokens.")] = 32_768,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Recompute each layer for the gradient.")] = True,
    gpu_memory_utilization: Annotated[float, typer.Option(help="The engine's share of the GPU's memory.")] = 0.4,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences generated at once.")] = 512,
    dtype: Annotated[str, typer.Option(help="Of passes and of the served weights.")] = "bfloat16",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Further config: key=value.")] = None,
    profile: Annotated[bool, typer.Option(help="One more step under torch's profiler.")] = False,
    peak_tflops: Annotated[float, typer.Option(help="bf16, dense; MFU is a share of it.")] = 989.0,
    sustained_tflops: Annotated[float, typer.Option(help="For the limits.")] = 790.0,
    bandwidth_tbs: Annotated[float, typer.Option(help="For the limits, 10^12 bytes a second.")] = 4.3,
    work: Annotated[Path, typer.Option(help="Models and stages go here.")] = Path("/tmp/moonshift-bench"),
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measure warm steps on random weights; the bars at 1.7b on one H200 are 16 s a step, 11.5 rollout, 8 update."""
    sizes = SHAPES[shape]
    machine = Machine(peak_tflops=peak_tflops, sustained_tflops=sustained_tflops, bandwidth_tbs=bandwidth_tbs)
    values = {
        "actor_rollout_ref.model.enable_gradient_checkpointing": gradient_checkpointing,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": max_tokens,
        "actor_rollout_ref.actor.fsdp_config.dtype": dtype,
        "actor_rollout_ref.rollout.name": engine,
        "actor_rollout_ref.rollout.dtype": dtype,
        "actor_rollout_ref.rollout.gpu_memory_utilization": gpu_memory_utilization,
        "actor_rollout_ref.rollout.max_num_seqs": min(max_num_seqs, sizes.sequences),
    }
    config = settings(sizes, warmup + steps + 1, values, set_ or [])
    folder = model_folder(shape, work)
    started = time.perf_counter()
    worker = TimedWorker(to_json(config), make_plan(config, sizes.prompts * (warmup + steps + 1)))
    worker.load(str(folder), None)
    synchronize()
    loaded = time.perf_counter() - started
    start = {"model_load_s": loaded - worker.engine_start_s, "engine_start_s": worker.engine_start_s}
    measured = []
    for step in range(1, warmup + steps + 1):
        found = run_step(worker, sizes, step, work)
        found |= rates(sizes, machine, step_s=found["step_s"], update_s=found["update_s"])
        kind = "warm-up" if step <= warmup else "measured"
        seconds = {key: round(found[key], 3) for key in ("step_s", "rollout_s", "update_s")}
        print(f"step {step} ({kind}): {seconds}", flush=True)
        if step <= warmup:
            start[f"step_{step}_s"] = found["step_s"]
        else:
            measured.append(found)
    result = {
        "shape": shape,
        "engine": engine,
        "workload": described(sizes),
        "settings": values | {"set": set_ or []},
        "start": start,
        "mean": mean(measured),
        "limits": limits(sizes, machine),
        "steps": measured,
    } | provenance()
    show(result)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if profile:
        run_step(worker, sizes, warmup + steps + 1, work, profiled)


if __name__ == "__main__":
    typer.run(main)
