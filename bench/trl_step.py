"""Warm GRPO steps of TRL's GRPOTrainer on the work of `grpo_step.py`: `python -m bench.trl_step`; written for trl 1.16.

TRL as it comes, vLLM in the same process and asleep while training: loss of token means over the whole batch, old
log-probs computed after each rollout for its importance sampling (`--no-importance-sampling` leaves both out). Weights
are float32 and passes bfloat16, as the product has them; `--weights bfloat16` makes all of training bfloat16. Seconds
are taken around TRL's own methods: generation with scoring, weight sync, and by a callback the optimizer step.
"""

import json
import os
import random
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.workload import (
    SHAPES,
    Machine,
    Shape,
    begin_peak,
    described,
    mean,
    model_folder,
    peak_memory,
    prompts,
    provenance,
    rates,
    synchronize,
)


def reward(completions: list[str], **_: Any) -> list[float]:
    """A random number each: there is nothing to learn."""
    return [random.random() for _ in completions]


def timed_trainer(trl: Any, clock: dict[str, float]) -> type:
    """GRPOTrainer that adds to `clock` the seconds of `rollout_s`, `generate_s` and `sync_s`.

    Peak memory is counted from the end of the generation on: the engine sleeps, old log-probs and update follow.
    """

    def timed(name: str, call: Callable[..., Any], after: Callable[[], None] = lambda: None) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            started = time.perf_counter()
            result = call(*args, **kwargs)
            synchronize()
            clock[name] = clock.get(name, 0.0) + time.perf_counter() - started
            after()
            return result

        return wrapper

    class TimedTrainer(trl.GRPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._generate_and_score_completions = timed("rollout_s", self._generate_and_score_completions)
            # the sync may come inside of `generate` too; `generate_s` is made less by it below
            self._generate_single_turn = timed("generate_s", self._generate_single_turn, begin_peak)
            if self.use_vllm:
                self.vllm_generation.sync_weights = timed("sync_s", self.vllm_generation.sync_weights)

    return TimedTrainer


def step_timer(clock: dict[str, float], steps: list[dict[str, float]]) -> Any:
    """A callback that appends one row a step; the update is what remains of a step after its rollout."""
    from transformers import TrainerCallback

    class StepTimer(TrainerCallback):
        started = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            clock.clear()
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            step_s = time.perf_counter() - self.started
            row = {"step_s": step_s, "sync_s": 0.0} | clock | {"update_s": step_s - clock["rollout_s"]}
            row["generate_s"] -= row["sync_s"]
            steps.append(row | peak_memory())
            print(f"step {len(steps)}: { {key: round(row[key], 3) for key in row if key.endswith('_s')} }", flush=True)

    return StepTimer()


def arguments(shape: Shape, micro_batch: int, steps: int, vllm: dict[str, Any] | None, dtype: str) -> dict[str, Any]:
    """GRPOConfig's arguments for the workload. `vllm`: its settings, or None for Transformers' own generation."""
    if vllm is None:  # Transformers ends a response at an end token, so none may come before the last
        generation = {"generation_kwargs": {"min_new_tokens": shape.response_tokens}, "use_vllm": False}
    else:
        generation = vllm | {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": torch.cuda.is_available(),
            "vllm_max_model_length": shape.prompt_tokens + shape.response_tokens,
            "generation_kwargs": {"ignore_eos": True},
        }
    return generation | {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": shape.sequences // micro_batch,
        "num_generations": shape.samples,
        "max_completion_length": shape.response_tokens,
        "temperature": 1.0,
        "beta": 0.0,
        "num_iterations": 1,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "max_steps": steps,
        "bf16": dtype == "bfloat16" and torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "1.7b",
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 2,
    micro_batch: Annotated[int, typer.Option(help="Samples a pass.")] = 32,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Recompute each layer for the gradient.")] = True,
    gpu_memory_utilization: Annotated[float, typer.Option(help="vLLM's share of the GPU's memory.")] = 0.4,
    dtype: Annotated[str, typer.Option(help="Of the passes: bfloat16 | float32.")] = "bfloat16",
    weights: Annotated[str, typer.Option(help="Of the trained weights: float32 | bfloat16.")] = "float32",
    importance_sampling: Annotated[bool, typer.Option(help="TRL's correction, which needs old log-probs.")] = True,
    vllm: Annotated[bool, typer.Option(help="Off: Transformers generates.")] = True,
    peak_tflops: Annotated[float, typer.Option(help="bf16, dense; MFU is a share of it.")] = 989.0,
    work: Annotated[Path, typer.Option(help="Models go here.")] = Path("/tmp/moonshift-bench"),
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measure TRL's warm steps on random weights."""
    for name, value in (("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1"), ("VLLM_USE_FLASHINFER_SAMPLER", "0")):
        os.environ.setdefault(name, value)  # read at the import of the libraries below
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM")
    import pyarrow
    from datasets import Dataset
    from transformers import AutoTokenizer

    trl = import_module("trl")  # installed for this bench alone

    sizes = SHAPES[shape]
    folder = model_folder(shape, work)
    texts = [
        " ".join(f"w{token}" for token in prompt)
        for step in range(warmup + steps)
        for prompt in prompts(sizes, step + 1)
    ]
    engine = {"vllm_gpu_memory_utilization": gpu_memory_utilization} if vllm else None
    config = trl.GRPOConfig(
        output_dir=str(work / "trl"),
        gradient_checkpointing=gradient_checkpointing,
        vllm_importance_sampling_correction=importance_sampling,
        model_init_kwargs={"dtype": weights, "attn_implementation": "sdpa"},
        **arguments(sizes, min(micro_batch, sizes.sequences // 2), warmup + steps, engine, dtype),
    )
    clock: dict[str, float] = {}
    rows: list[dict[str, float]] = []
    started = time.perf_counter()
    trainer = timed_trainer(trl, clock)(
        model=str(folder),
        reward_funcs=reward,
        args=config,
        # with a fingerprint of ours: some versions of pyarrow and dill cannot compute one together
        train_dataset=Dataset(pyarrow.table({"prompt": texts}), fingerprint=f"bench-{shape}"),  # pyright: ignore[reportArgumentType]
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[step_timer(clock, rows)],
    )
    start_s = time.perf_counter() - started
    trainer.train()
    seen = max(row.get("num_tokens", 0) for row in trainer.state.log_history)
    assert seen == sizes.tokens * (warmup + steps), (
        f"{seen} tokens in {warmup + steps} steps, not {sizes.tokens} in each"
    )
    machine = Machine(peak_tflops=peak_tflops, sustained_tflops=peak_tflops, bandwidth_tbs=1.0)
    for row in rows:
        row |= rates(sizes, machine, step_s=row["step_s"], update_s=row["update_s"])
    result = {
        "shape": shape,
        "engine": "trl",
        "workload": described(sizes),
        "settings": {
            "micro_batch": micro_batch,
            "gradient_checkpointing": gradient_checkpointing,
            "gpu_memory_utilization": gpu_memory_utilization,
            "dtype": dtype,
            "weights": weights,
            "importance_sampling": importance_sampling,
            "vllm": vllm,
        },
        "start": {"start_s": start_s, "step_1_s": rows[0]["step_s"]},
        "mean": mean(rows[warmup:]),
        "steps": rows[warmup:],
    } | provenance()
    print(json.dumps(result["mean"], indent=2))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
