"""A handle on one Ray actor: every wait has a deadline, and a worker that is lost says why."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from moonshift.core.config.schema import Config
from moonshift.core.errors import MoonshiftError, StageError, WorkerLostError

from ..files import as_storage_error
from ..home import home, stacks_folder
from . import stacks

Note = Callable[[str, dict[str, Any]], None]
"""Told of what happened: a kind, and its detail as plain values."""


class WorkerHandle:
    """One Ray actor, its role's name for messages, and the deadline of its calls."""

    def __init__(self, actor: Any, role: str, config: Config, note: Note) -> None:
        self.actor = actor
        self.role = role
        self._note = note
        self.deadline_s = config.recovery.stage_timeout_s
        """seconds that a call may take from now on"""
        self._pid = actor.identify.remote()

    def begin(self, method: str, *arguments: Any) -> Any:
        """Start a call and go on."""
        return getattr(self.actor, method).remote(*arguments)

    def end(self, reference: Any, method: str, timeout_s: float | None = None) -> Any:
        """Wait for a call that was begun; the stack of a worker that does not answer is noted."""
        what = f"{method} of role {self.role}"
        try:
            return wait(reference, what, timeout_s or self.deadline_s)
        except WorkerLostError as error:
            self._note("worker_lost", loss(what, error, self.stack()))
            raise

    def stack(self) -> str:
        """What the worker is doing, where it lives on this machine."""
        pid = self._local_pid()
        return stacks.dump(stacks_folder(), pid) if pid is not None else ""

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
        raise silent(what, timeout_s) from error
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


def silent(what: str, timeout_s: float) -> WorkerLostError:
    """The error of a worker that has not answered in time."""
    return WorkerLostError(
        f"{what} did not answer within {timeout_s:.0f} s; raise recovery.stage_patience_s, or "
        "recovery.stage_timeout_s, if it needs longer."
    )


def loss(call: str, error: WorkerLostError, stack: str) -> dict[str, Any]:
    """The detail of the event `worker_lost`."""
    return {"call": call, "error": str(error), "memory": memory_state(), "stack": stack}


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
