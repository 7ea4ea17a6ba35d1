"""`moonshift plan`: the batch plan as a table a person can check, a drawing of the devices, and JSON for scripts."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moonshift.core.config import LoadedConfig, load_config
from moonshift.core.config.schema import Config
from moonshift.core.plan import BatchPlan, make_plan
from moonshift.core.plan.batch_plan import ForwardPlan, TrainPlan
from moonshift.core.plan.memory import Memory, estimate
from moonshift.core.plan.mesh import Place, places
from moonshift.core.plan.notes import notes
from moonshift.core.plan.rules import faults
from moonshift.core.plan.sizes import sizes_of
from moonshift.infra.planning import known_prompts, known_shape

GIB = 2**30
SHOWN_NODES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Everything that the view shows; `plan` is None where a rule is broken."""

    plan: BatchPlan | None
    faults: list[str]
    notes: list[str]
    mesh: list[Place]
    memory: Memory | None
    capacity: int
    """bytes of a GPU's memory"""


def plan_config(path: Path | None, overrides: tuple[str, ...], gpu_memory_gib: float) -> tuple[LoadedConfig, Planned]:
    """Load and plan; takes no GPU and starts nothing.

    Raises:
        ConfigError, ModelError: what the config says is wrong in itself. Broken rules are in the result.
    """
    loaded = load_config(path, overrides)
    config = loaded.config
    prompts, why_not = known_prompts(config)
    shape, no_shape = known_shape(config)
    capacity = int(gpu_memory_gib * GIB)
    sizes = sizes_of(config, prompts, shape)
    broken = faults(sizes)
    unknown = [f"the rows of data.train_files cannot be counted: {why_not}"] if why_not else []
    unknown += [f"memory is not estimated: {no_shape}"] if no_shape else []
    if broken:
        return loaded, Planned(
            plan=None, faults=broken, notes=unknown, mesh=[], memory=None, capacity=capacity
        )  # fmt: skip
    plan = make_plan(config, prompts, shape)
    memory = estimate(config, plan, shape) if shape else None
    return loaded, Planned(
        plan=plan,
        faults=[],
        notes=[*unknown, *notes(sizes, plan), *_does_not_fit(memory, capacity)],
        mesh=places(config, plan),
        memory=memory,
        capacity=capacity,
    )


def _does_not_fit(memory: Memory | None, capacity: int) -> list[str]:
    if memory is None or memory.total <= capacity:
        return []
    largest = max(memory.parts, key=lambda name: memory.parts[name])
    return [
        f"WARNING: about {memory.total / GIB:.1f} GiB a GPU are needed and {capacity / GIB:g} GiB are there "
        f"(--gpu-memory); the largest part is {largest}: {memory.parts[largest] / GIB:.1f} GiB"
    ]


def as_json(planned: Planned) -> str:
    """One flat object for scripts, numbers under the names of `BatchPlan`; `legal` false with `faults` otherwise."""
    if planned.plan is None:
        return json.dumps({"legal": False, "faults": planned.faults, "notes": planned.notes}, indent=1)
    plan = planned.plan
    numbers: dict[str, Any] = {
        **{key: value for key, value in asdict(plan).items() if isinstance(value, int)},
        "samples_per_rank_per_mini_batch": plan.actor.samples_per_rank_per_mini_batch,
        "samples_per_mini_batch": plan.actor.samples_per_mini_batch,
        "micro_batch_size": plan.actor.micro_batch_size,
        "micro_batches_per_mini_batch": plan.actor.micro_batches_per_mini_batch,
        "max_tokens_per_micro_batch": plan.actor.max_tokens,
        "optimizer_steps_per_step": plan.actor.optimizer_steps_per_step,
        "optimizer_steps": plan.optimizer_steps,
        "log_prob_micro_batches": plan.log_prob.micro_batches,
        "ref_log_prob_micro_batches": plan.reference and plan.reference.micro_batches,
        "critic": plan.critic and asdict(plan.critic),
        "on_policy": plan.on_policy,
        "steps": plan.steps or None,
    }
    memory = planned.memory and {**planned.memory.parts, "total": planned.memory.total}
    return json.dumps(
        {
            "legal": True,
            **numbers,
            "memory_bytes_per_gpu": memory,
            "memory_assumed": planned.memory.assumed if planned.memory else [],
            "mesh": [asdict(place) | {"parts": dict(place.parts)} for place in planned.mesh],
            "notes": planned.notes,
        },
        indent=1,
    )


def show(config: Config, planned: Planned, console: Console) -> None:
    """Tables on a terminal."""
    if planned.plan is not None:
        console.print(_numbers(planned.plan))
        for line in _drawing(planned.mesh, config):
            console.print(line, highlight=False, soft_wrap=True)
    if planned.memory is not None:
        console.print(_memory(planned.memory, planned.capacity))
        for line in planned.memory.assumed:
            console.print(f"  assumed: {line}", soft_wrap=True)
    for note in planned.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)


def _numbers(plan: BatchPlan) -> Table:
    table = Table("number", "value", "unit", "who uses it", title="Batch plan")
    table.columns[1].justify = "right"
    for name, value, unit, user in _rows(plan):
        table.add_row(name, "–" if value is None else f"{value:,}", unit, user)
    return table


def _rows(plan: BatchPlan) -> Iterator[tuple[str, int | None, str, str]]:
    yield "GPUs", plan.world, "GPUs (1: a process on the CPU)", "cluster"
    yield "prompts a step", plan.prompts_per_step, "prompts", "sampler"
    yield "responses a prompt", plan.samples_per_prompt, "samples", "rollout, advantage groups"
    yield "samples a step", plan.samples_per_step, "samples", "every stage"
    yield "inference replicas", plan.rollout_replicas, f"replicas of {plan.replica_gpus} GPU(s)", "rollout"
    yield "prompts a replica", plan.prompts_per_replica, "prompts", "rollout"
    yield "samples a replica", plan.samples_per_replica, "samples", "rollout"
    yield "DP size", plan.dp_size, f"shard groups of {plan.model_parallel} GPU(s)", "log-probs, update"
    yield "samples a rank", plan.samples_per_rank, "samples a DP rank and step", "log-probs, update"
    yield from _forward_rows("log-prob", plan.log_prob)
    if plan.reference is not None:
        yield from _forward_rows("reference", plan.reference)
    yield from _train_rows("actor", plan.actor)
    if plan.critic is not None:
        yield from _train_rows("critic", plan.critic)
    yield "steps", plan.steps or None, "steps of the run", "flow"
    yield "optimizer steps", plan.optimizer_steps or None, "optimizer steps of the run", "flow"


def _forward_rows(name: str, plan: ForwardPlan) -> Iterator[tuple[str, int | None, str, str]]:
    if plan.max_tokens is None:
        yield f"{name} micro-batch", plan.micro_batch_size, "samples a pass and rank", f"{name} forward"
        yield f"{name} micro-batches", plan.micro_batches, "passes a rank and step", f"{name} forward"
    else:
        yield f"{name} token budget", plan.max_tokens, "tokens a pass and rank, hard cap", f"{name} forward"
        yield f"{name} micro-batches", plan.micro_batches, "passes a rank and step, at most", f"{name} forward"


def _train_rows(name: str, plan: TrainPlan) -> Iterator[tuple[str, int | None, str, str]]:
    yield f"{name} mini-batch", plan.samples_per_mini_batch, "samples an optimizer step, all ranks", f"{name} update"
    yield f"{name} samples a rank", plan.samples_per_rank_per_mini_batch, "samples a mini-batch", f"{name} update"
    if plan.max_tokens is None:
        yield f"{name} micro-batch", plan.micro_batch_size, "samples a pass and rank", f"{name} update"
        yield f"{name} micro-batches", plan.micro_batches_per_mini_batch, "passes a mini-batch", f"{name} update"
    else:
        yield f"{name} token budget", plan.max_tokens, "tokens a pass and rank, hard cap", f"{name} update"
        yield f"{name} micro-batches", plan.micro_batches_per_mini_batch, "passes a mini-batch, at most", name
    yield f"{name} optimizer steps", plan.optimizer_steps_per_step, f"a step ({plan.epochs} epoch(s))", f"{name} update"


def _drawing(mesh: list[Place], config: Config) -> Iterator[str]:
    """One block a node: which replica and which shard group each GPU belongs to."""
    yield "Devices: R replica, D data-parallel rank, and the position within its shard group"
    nodes = sorted({place.node for place in mesh})
    for node in nodes[:SHOWN_NODES]:
        members = [place for place in mesh if place.node == node]
        cells = [
            [f"GPU {place.gpu}" for place in members],
            [f"R{place.replica}.{place.replica_rank}" for place in members],
            [f"D{place.dp} " + " ".join(f"{name}{rank}" for name, rank in place.parts) for place in members],
        ]
        width = max(len(cell) for row in cells for cell in row)
        for label, row in zip((f"node {node}", "rollout", "train"), cells, strict=True):
            yield f"  {label:<9}" + " │ ".join(f"{cell:<{width}}" for cell in row)
    if len(nodes) > SHOWN_NODES:
        yield f"  … and {len(nodes) - SHOWN_NODES} more nodes in the same way (--json lists every GPU)"


def _memory(memory: Memory, capacity: int) -> Table:
    table = Table("memory a GPU", "GiB", title="Estimate")
    table.columns[1].justify = "right"
    for name, size in memory.parts.items():
        table.add_row(name, f"{size / GIB:.2f}")
    table.add_row("total", f"{memory.total / GIB:.2f} of {capacity / GIB:g}")
    return table
