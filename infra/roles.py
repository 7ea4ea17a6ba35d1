"""Typed handles on the workers: the only place that waits on Ray, and every wait has a deadline."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from moonshift.core.config import to_json
from moonshift.core.config.schema import Config
from moonshift.core.errors import MoonshiftError, StageError, WorkerLostError
from moonshift.core.plan import BatchPlan
from moonshift.core.rewards.graded import Graded
from moonshift.core.training.advantages import Stages
from moonshift.core.types import Prompt

from .cluster import has_gpu, workers_home
from .files import as_storage_error
from .home import home, stacks_folder
from .rewards import RewardStream
from .workers import stacks
from .workers.model import ModelWorker, RolloutOrder, WorkedExamples
from .workers.reward import RewardWorker, alike, write_graded

Note = Callable[[str, dict[str, Any]], None]
"""Told of what happened: a kind, and its detail as plain values."""


class Role(StrEnum):
    """What a worker does; a colocated worker carries several roles in one process."""

    ACTOR_ROLLOUT = "actor_rollout"
    ACTOR_ROLLOUT_REF = "actor_rollout_ref"
    REWARD = "reward"


class _Handle:
    """One Ray actor, its role's name for messages, and the deadline of its calls."""

    def __init__(self, actor: Any, role: Role, config: Config, note: Note) -> None:
        self.actor = actor
        self._role = role
        self._note = note
        self._start_timeout_s = config.recovery.start_timeout_s
        self.deadline_s = config.recovery.stage_timeout_s
        """seconds that a call may take from now on"""
        self._pid = actor.identify.remote()

    def begin(self, method: str, *arguments: Any) -> Any:
        """Start a call and go on."""
        return getattr(self.actor, method).remote(*arguments)

    def end(self, reference: Any, method: str, timeout_s: float | None = None) -> Any:
        """Wait for a call that was begun; the stack of a worker that does not answer is noted."""
        what = f"{method} of role {self._role}"
        try:
            return wait(reference, what, timeout_s or self.deadline_s)
        except WorkerLostError as error:
            pid = self._local_pid()
            stack = stacks.dump(stacks_folder(), pid) if pid is not None else ""
            self._note("worker_lost", {"call": what, "error": str(error), "memory": memory_state(), "stack": stack})
            raise

    def kill(self) -> None:
        """End the worker at once, also one that is stopped or holds the interpreter and so hears nothing of Ray's."""
        pid = self._local_pid()
        ray.kill(self.actor)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _local_pid(self) -> int | None:
        """Of a worker that is alive on this machine."""
        if os.environ.get("RAY_ADDRESS"):
            return None
        try:
            pid: Any = ray.get(self._pid, timeout=1.0)
            # a number may have been given to another process since
            return pid if "ray::" in "".join(psutil.Process(pid).cmdline()) else None
        except (RayError, psutil.Error):
            return None

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        return self.end(self.begin(method, *arguments), method, timeout_s)


class ModelHandle(_Handle):
    """The roles actor, rollout and ref."""

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

    def save(self, out: str) -> None:
        """Write weights and all training state to `out`."""
        self._call("save", out)

    def weights_sha256(self) -> str:
        """Hash of the weights."""
        return self._call("weights_sha256")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The results of a batch, in row order."""

    graded: list[Graded]
    tail_s: float
    """seconds from when the last sample was there until all had a result"""


class RewardHandle:
    """The role reward: `reward.num_workers` processes that share the samples of a batch."""

    def __init__(self, actors: list[Any], config: Config, note: Note) -> None:
        self.workers = [_Handle(actor, Role.REWARD, config, note) for actor in actors]

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
        cuts = [round(index * num_samples / len(self.workers)) for index in range(len(self.workers) + 1)]
        return [range(start, stop) for start, stop in pairwise(cuts)]


class Roles:
    """All workers of an attempt. They are not detached: they end with this process."""

    def __init__(self, config: Config, plan: BatchPlan, note: Note) -> None:
        """`note(kind, detail)` is told when a worker was lost."""
        role = Role.ACTOR_ROLLOUT_REF if config.needs_reference else Role.ACTOR_ROLLOUT
        gpus = 1 if config.trainer.device != "cpu" and has_gpu() else 0
        text = to_json(config)
        # stateful workers are never restarted behind our back: a fresh one would hold other weights
        options: dict[str, Any] = {
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": _THREADS | workers_home()},
        }
        model = ray.remote(ModelWorker).options(num_cpus=1, num_gpus=gpus, **options).remote(text, plan)
        graders = ray.remote(RewardWorker).options(num_cpus=0, num_gpus=0, **options)
        rewards = [graders.remote(text) for _ in range(config.reward.num_workers)]
        self.model = ModelHandle(model, role, config, note)
        self.reward = RewardHandle(rewards, config, note)

    def set_deadline(self, seconds: float) -> None:
        """How long each call of a stage may take from now on."""
        for handle in (self.model, *self.reward.workers):
            handle.deadline_s = seconds

    def stop(self) -> None:
        """End the workers at once."""
        for handle in (self.model, *self.reward.workers):
            handle.kill()


# Ray sets OMP_NUM_THREADS to the CPUs a worker asked for; an empty value lets torch use all cores
_THREADS = {"OMP_NUM_THREADS": ""}


def wait(reference: Any, what: str, timeout_s: float) -> Any:
    """Wait for a Ray result.

    Raises:
        WorkerLostError: after the deadline, or when the worker died, saying which and why.
        StageError: any other failure of the call.
        MoonshiftError: the error that the worker itself raised.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError as error:
        raise WorkerLostError(
            f"{what} did not answer within {timeout_s:.0f} s; raise recovery.stage_patience_s, or "
            "recovery.stage_timeout_s, if it needs longer."
        ) from error
    except RayTaskError as error:
        cause = error.cause
        refused = cause if isinstance(cause, MoonshiftError) else as_storage_error(cause, home())
        if refused is not None:
            raise refused from error
        raise StageError(f"{what} failed: {type(cause).__name__}: {cause}") from error
    except (RayActorError, OutOfMemoryError) as error:  # the second: Ray's own memory monitor ended it
        raise WorkerLostError(
            f"{what} ended because its worker process died: {error} Memory: {memory_state()}."
        ) from error
    except RayError as error:
        raise StageError(f"{what} failed in Ray: {error}") from error


def memory_state() -> str:
    """What is free on this machine, and what the kernel says of this container's limit and of whom it killed for it."""
    memory = psutil.virtual_memory()
    told = [f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free on this machine"]
    group = Path("/sys/fs/cgroup")
    limit, events = group / "memory.max", group / "memory.events"
    if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        told.append(f"limit of this container {int(text) / 2**30:.1f} GiB")
    if events.is_file():
        counts = dict(line.split() for line in events.read_text(encoding="ascii").splitlines())
        if int(counts.get("oom_kill", 0)):
            told.append(f"the kernel has killed {counts['oom_kill']} process(es) here for want of memory")
    return ", ".join(told)
