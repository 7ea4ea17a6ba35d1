"""Typed handles on the workers: what a stage may ask of whom."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moonshift.core.config import to_json
from moonshift.core.config.schema import Config
from moonshift.core.errors import ConfigError, WorkerLostError
from moonshift.core.plan import BatchPlan
from moonshift.core.plan.packing import spans
from moonshift.core.rewards.graded import Graded
from moonshift.core.training.advantages import Stages
from moonshift.core.types import Prompt

from .cluster import num_gpus, workers_home
from .recovery import DIVISOR, MEMORY_BUDGET
from .rewards import RewardStream
from .workers.group import WorkerGroup
from .workers.handle import Note, WorkerHandle
from .workers.model import ModelWorker
from .workers.orders import RolloutOrder, WorkedExamples
from .workers.reward import RewardWorker, alike, write_graded

_ASK_S = 2.0
"""How long ranks of a lost group may take to say what they have learned of the memory."""


class Role(StrEnum):
    """What a worker does; a colocated worker carries several roles in one process."""

    ACTOR_ROLLOUT = "actor_rollout"
    ACTOR_ROLLOUT_REF = "actor_rollout_ref"
    REWARD = "reward"


class ModelHandle:
    """The roles actor, rollout and ref, by one process or several ranks."""

    def __init__(self, actors: Sequence[Any], role: Role, config: Config, note: Note) -> None:
        self._start_timeout_s = config.recovery.start_timeout_s
        self._note = note
        workers = [WorkerHandle(actor, role, config, note) for actor in actors]
        self.group = WorkerGroup(workers, note, self._start_timeout_s)
        self._alone = len(workers) == 1

    def load(
        self,
        initial: str,
        checkpoint: str | None,
        critic: str | None = None,
        divisors: Mapping[str, int] | None = None,
    ) -> int:
        """Load weights; returns their policy version."""
        return self._call("load", initial, checkpoint, critic, divisors, timeout_s=self._start_timeout_s)

    def warm_start(self, examples: WorkedExamples, out: str) -> dict[str, float]:
        """Supervised fine-tuning; the model goes to `out/model`."""
        return self._call("warm_start", examples, out)

    def rollout(self, order: RolloutOrder, out: str, stream: RewardStream | None = None) -> dict[str, float]:
        """Generate responses into `out`; each is told to `stream` when it is whole."""
        return self._call("rollout", order, out, stream)

    def log_probs(self, rollouts: str, out: str) -> dict[str, float]:
        """Log-probs of a rollout batch into `out`."""
        return self._call("log_probs", rollouts, out)

    def advantage(self, stages: Stages, out: str, kl_coef: float | None) -> dict[str, float]:
        """The redo log of a step into `out`."""
        return self._call("advantage", stages, out, kl_coef)

    def update(self, redo: str, step: int) -> dict[str, float]:
        """Apply a step's redo log to the weights."""
        return self._call("update", redo, step)

    def save(self, out: str) -> dict[str, float]:
        """Write weights and all training state to `out`."""
        return self._call("save", out)

    def weights_sha256(self) -> str:
        """Hash of the weights."""
        return self._call("weights_sha256")

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Rank 0's answer; of what each rank measures for itself, the largest."""
        try:
            told = self.group.call(method, *arguments, timeout_s=timeout_s)
        except WorkerLostError:
            self._note_memory()
            raise
        if not isinstance(told[0], dict):
            return told[0]
        largest: dict[str, float] = {}
        for key, value in (pair for each in told for pair in each.items()):
            if key.startswith((DIVISOR, "perf/max_memory", "memory/")):
                largest[key] = max(value, largest.get(key, value))
        return told[0] | largest

    def _note_memory(self) -> None:
        """Keep what ranks have learned of the memory, for those that take their place.

        A rank alone cuts its passes smaller and goes on; one of several cannot, since the others wait within a pass.
        """
        if self._alone:
            return
        for divisors in self.group.answers("learned_divisors", _ASK_S):
            for what, divisor in divisors.items():
                self._note(MEMORY_BUDGET, {"what": what, "divisor": divisor})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The results of a batch, in row order."""

    graded: list[Graded]
    tail_s: float
    """seconds from when the last sample was there until all had a result"""


class RewardHandle:
    """The role reward: `reward.num_workers` processes that share the samples of a batch."""

    def __init__(self, actors: list[Any], config: Config, note: Note) -> None:
        self.workers = [WorkerHandle(actor, Role.REWARD, config, note) for actor in actors]

    def stream(self, prompts: Sequence[Prompt], samples_per_prompt: int) -> RewardStream | None:
        """Where to send the samples of a batch while it is generated, so that `score` finds most of them graded; None
        where a reward takes the whole batch at once."""
        started = [(worker, worker.begin("expect", list(prompts), samples_per_prompt)) for worker in self.workers]
        streams = [worker.end(reference, "expect") for worker, reference in started]
        if not all(streams):
            return None
        stops = [share.stop for share in self._shares(len(prompts) * samples_per_prompt)]
        return RewardStream(actors=[worker.actor for worker in self.workers], stops=stops)

    def score(self, prompts: Sequence[Prompt], rollouts: str, num_samples: int, out: str) -> Scored:
        """Grade a rollout batch of `num_samples` rows into `out`."""
        started = [
            (worker, worker.begin("grade", list(prompts), rollouts, share))
            for worker, share in zip(self.workers, self._shares(num_samples), strict=True)
            if share
        ]
        parts = [worker.end(reference, "grade") for worker, reference in started]
        graded = alike([Graded(components=numbers, error=error) for part, _ in parts for numbers, error in part])
        write_graded(graded, Path(out))
        return Scored(graded=graded, tail_s=max(tail_s for _, tail_s in parts))

    def _shares(self, num_samples: int) -> list[range]:
        """The rows of each worker."""
        return spans(num_samples, len(self.workers))


class Roles:
    """All workers of an attempt. They are not detached: they end with this process."""

    def __init__(self, config: Config, plan: BatchPlan, note: Note) -> None:
        """`note(kind, detail)` is told when a worker was lost.

        Raises:
            ConfigError: the cluster has fewer GPUs than the plan wants.
        """
        role = Role.ACTOR_ROLLOUT_REF if config.needs_reference else Role.ACTOR_ROLLOUT
        available = 0 if config.trainer.device == "cpu" else num_gpus()
        if 0 < available < plan.world:
            raise ConfigError(
                f"trainer.nnodes × trainer.n_gpus_per_node = {plan.world} training processes need a GPU each, and the "
                f"cluster has {available}; lower them, or join more machines to the cluster."
            )
        text = to_json(config)
        # stateful workers are never restarted behind our back: a fresh one would hold other weights
        options: dict[str, Any] = {
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": _THREADS | workers_home()},
        }
        self._places = _reserve(config, gpus=available > 0) if plan.world > 1 else None
        models = [
            ray.remote(ModelWorker)
            .options(num_gpus=1 if available else 0, **options | self._place(rank, config.trainer.n_gpus_per_node))
            .remote(text, plan, rank)
            for rank in range(plan.world)
        ]
        graders = ray.remote(RewardWorker).options(num_cpus=0, num_gpus=0, **options)
        rewards = [graders.remote(text) for _ in range(config.reward.num_workers)]
        self.model = ModelHandle(models, role, config, note)
        self.reward = RewardHandle(rewards, config, note)

    def _place(self, rank: int, per_node: int) -> dict[str, Any]:
        """Ray's options of one rank: neighbours in rank share a machine."""
        if self._places is None:
            return {"num_cpus": 1}
        bundle = PlacementGroupSchedulingStrategy(self._places, placement_group_bundle_index=rank // per_node)
        return {"num_cpus": 0, "scheduling_strategy": bundle}

    def set_deadline(self, seconds: float) -> None:
        """How long each call of a stage may take from now on."""
        for handle in (self.model.group, *self.reward.workers):
            handle.deadline_s = seconds

    def stop(self) -> None:
        """End the workers at once."""
        for handle in (self.model.group, *self.reward.workers):
            handle.kill()
        if self._places is not None:
            remove_placement_group(self._places)


# Ray sets OMP_NUM_THREADS to the CPUs a worker asked for; an empty value lets torch use all cores
_THREADS = {"OMP_NUM_THREADS": ""}


def _reserve(config: Config, *, gpus: bool) -> PlacementGroup:
    """Room for the ranks of each machine, together or not at all."""
    trainer = config.trainer
    bundle = {"CPU": 1.0} | ({"GPU": float(trainer.n_gpus_per_node)} if gpus else {})
    return placement_group([bundle] * trainer.nnodes, strategy="STRICT_SPREAD" if trainer.nnodes > 1 else "PACK")
