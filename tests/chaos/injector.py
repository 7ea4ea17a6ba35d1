"""Acts at the k-th call of a chosen kind in the processes of a run: kills the process or lets the call fail.

The harness writes a plan into a folder and names the folder in MOONSHIFT_CHAOS; `inject/sitecustomize.py` then installs
this file in the driver and in every Ray worker. Only the standard library is imported here, the product is not changed:
calls are counted where Python makes them. What the kinds count:

    write    a file below MOONSHIFT_HOME/runs that was written and is being closed, whoever writes it (Python,
             safetensors, Parquet); a file written by another native library is not seen
    fsync    os.fsync of a file or folder below MOONSHIFT_HOME
    rename   os.rename and os.replace below MOONSHIFT_HOME
    commit   a commit that changes the SQLite ledger
    ray      an actor call made by the driver
    rollout, log_probs, update      a forward pass of a model inside that call of the model worker
    load, warm_start, advantage, save    that call of the model worker
"""

import errno
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

STORAGE_KINDS = ("write", "fsync", "rename", "commit")
FORWARD_KINDS = ("rollout", "log_probs", "update")
CALL_KINDS = ("load", "warm_start", "advantage", "save")
KINDS = (*STORAGE_KINDS, "ray", *FORWARD_KINDS, *CALL_KINDS)
ACTIONS = ("kill", "enospc", "eio", "oom")
MOMENTS = ("before", "after")
KEEPS = ("0", "1", "half", "last", "all")
"""How much of a file is on the disk when a `write` is struck: no byte, one, half, all but the last one, all."""

PLAN, CALLS, ACTED = "plan.json", "calls.jsonl", "acted.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, and when."""

    home: str
    """MOONSHIFT_HOME of the run, absolute"""
    kind: str = "write"
    at: int = 0
    """number of the call to act at, from 1; 0 never acts, and only counts"""
    action: str = "kill"
    moment: str = "before"
    """before | after the call, for all kinds but `write`"""
    keep: str = "half"
    """see KEEPS; for kind `write`"""
    role: str = "any"
    """driver | worker | any: the processes whose calls count"""
    always: bool = False
    """act at every call from `at` on; else once"""

    def __post_init__(self) -> None:
        """Raises ValueError for what does not fit together."""
        for name, allowed in (("kind", KINDS), ("action", ACTIONS), ("moment", MOMENTS), ("keep", KEEPS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(allowed)}.")
        if self.action in ("enospc", "eio") and self.kind not in STORAGE_KINDS:
            raise ValueError(f"{self.action} strikes {', '.join(STORAGE_KINDS)}, not {self.kind}.")
        if self.action == "oom" and self.kind not in (*FORWARD_KINDS, *CALL_KINDS):
            raise ValueError(f"oom strikes {', '.join((*FORWARD_KINDS, *CALL_KINDS))}, not {self.kind}.")
        if self.action != "kill" and self.moment == "after":
            raise ValueError(f"{self.action} is an answer to the call: it has no moment after it.")


def write_plan(folder: str, plan: Plan) -> None:
    """Put a plan into a fresh folder, whose path is then the value of MOONSHIFT_CHAOS."""
    os.makedirs(folder)
    with open(os.path.join(folder, PLAN), "w", encoding="utf-8") as file:
        json.dump(asdict(plan), file)


class Injector:
    """Counts the calls of this process together with those of the run's other processes, and acts when it is due."""

    def __init__(self, folder: str, role: str) -> None:
        with open(os.path.join(folder, PLAN), encoding="utf-8") as file:
            self.plan = Plan(**json.load(file))
        self.folder, self.role = folder, role
        self.inside = threading.local()
        """`.kind`: the call of the model worker that this thread is in"""

    def below(self, path: Any, *parts: str) -> bool:
        """Whether a path lies below the run's home; a descriptor does not."""
        if isinstance(path, int):
            return False
        try:
            text = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return False
        return text.startswith(os.path.join(self.plan.home, *parts) + os.sep)

    def around(self, kind: str, what: str, call: Callable[[], Any]) -> Any:
        """Make a call of a kind, and act before or after it when it is the chosen one."""
        due = self.reached(kind, what)
        if due and self.plan.moment == "before":
            self.act(what)
        result = call()
        if due and self.plan.moment == "after":
            self.act(what)
        return result

    def written(self, path: str) -> None:
        """A file has been written; if it is the chosen one, only a part of it stays."""
        if self.reached("write", path):
            size = os.path.getsize(path)
            kept = {"0": 0, "1": 1, "half": size // 2, "last": size - 1, "all": size}[self.plan.keep]
            os.truncate(path, max(0, min(kept, size)))
            self.act(path)

    def reached(self, kind: str, what: str) -> bool:
        """Count one call; whether to act at it."""
        plan = self.plan
        if plan.role not in ("any", self.role):
            return False
        number = self._count(kind, what)
        if kind != plan.kind or not plan.at or not (number >= plan.at if plan.always else number == plan.at):
            return False
        return self._mark(kind, number, what) or plan.always

    def _count(self, kind: str, what: str) -> int:
        """The number of this call among the run's, from 1; the lock is the kernel's, so a kill cannot keep it."""
        counter = _os_open(os.path.join(self.folder, f"{kind}.count"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(counter, fcntl.LOCK_EX)
            number = int(os.pread(counter, 20, 0) or b"0") + 1
            os.pwrite(counter, str(number).encode(), 0)
            self._append(CALLS, [kind, number, time.time(), self.role, os.getpid(), self._short(what)])
        finally:
            os.close(counter)
        return number

    def _mark(self, kind: str, number: int, what: str) -> bool:
        """Say that the run was struck; False where it was before."""
        try:
            os.close(_os_open(os.path.join(self.folder, ACTED), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        self._append(ACTED, [kind, number, time.time(), self.role, os.getpid(), self._short(what)])
        return True

    def _append(self, name: str, values: list[Any]) -> None:
        place = _os_open(os.path.join(self.folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(place, (json.dumps(values) + "\n").encode())
        finally:
            os.close(place)

    def _short(self, what: str) -> str:
        return what.removeprefix(self.plan.home + os.sep)

    def act(self, what: str) -> None:
        """Do what the plan says; returns never.

        Raises:
            OSError, sqlite3.OperationalError, torch.OutOfMemoryError: the failure of the plan.
        """
        action = self.plan.action
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "oom":
            import torch

            raise torch.OutOfMemoryError(f"CUDA out of memory. Injected into {what}.")
        if self.plan.kind == "commit":
            raise _sqlite_error(full=action == "enospc")
        number = errno.ENOSPC if action == "enospc" else errno.EIO
        raise OSError(number, os.strerror(number), what)


_os_open = os.open


def _sqlite_error(*, full: bool) -> Exception:
    """What SQLite raises at a COMMIT that the disk refuses; the transaction stays open, as it does then."""
    import sqlite3

    error = sqlite3.OperationalError("database or disk is full" if full else "disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL if full else sqlite3.SQLITE_IOERR
    return error


class _Opening:
    """`open` that watches files which are written; an object, not a function, so that no class binds it."""

    def __init__(self, injector: Injector) -> None:
        self._injector, self._open = injector, open

    def __call__(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        stream = self._open(file, mode, *arguments, **options)
        if set(mode) & set("wax+") and self._injector.below(file, "runs"):
            self._watch(stream, os.path.abspath(os.fsdecode(file)))
        return stream

    def _watch(self, stream: Any, path: str) -> None:
        close = stream.close

        def closed() -> None:
            if stream.closed:
                return
            close()
            self._injector.written(path)

        stream.close = closed  # `with` asks the object, not its class


def _patch_files(injector: Injector) -> None:
    import builtins
    import io

    opening: Any = _Opening(injector)
    builtins.open = io.open = opening
    rename, replace, fsync = os.rename, os.replace, os.fsync

    def moving(real: Callable[..., None]) -> Callable[..., None]:
        @wraps(real)
        def move(source: Any, target: Any, **options: Any) -> None:
            if not injector.below(target):
                return real(source, target, **options)
            return injector.around("rename", os.fsdecode(target), lambda: real(source, target, **options))

        return move

    @wraps(fsync)
    def flush(file: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")
        if not injector.below(path):
            return fsync(file)
        return injector.around("fsync", path, lambda: fsync(file))

    os.rename, os.replace, os.fsync = moving(rename), moving(replace), flush


def _patch_ledger(injector: Injector) -> None:
    import sqlite3
    from sqlite3 import dbapi2

    real = sqlite3.connect

    class Connection(sqlite3.Connection):
        """One to the ledger."""

        changes = 0

        def commit(self) -> None:
            if self.total_changes == self.changes:  # a transaction that only read
                return super().commit()
            injector.around("commit", "ledger.db", super().commit)
            self.changes = self.total_changes

    def connect(database: Any, *arguments: Any, **options: Any) -> Any:
        if injector.below(database) and os.path.basename(os.fsdecode(database)) == "ledger.db":
            options.setdefault("factory", Connection)
        return real(database, *arguments, **options)

    opening: Any = connect
    sqlite3.connect = dbapi2.connect = opening


def _patch_writer(injector: Injector, module: Any, name: str) -> None:
    """A function `(data, path, …)` that writes a file without Python's help."""
    real = getattr(module, name)

    @wraps(real)
    def write(data: Any, path: Any, *arguments: Any, **options: Any) -> Any:
        result = real(data, path, *arguments, **options)
        if injector.below(path, "runs"):
            injector.written(os.path.abspath(os.fsdecode(path)))
        return result

    setattr(module, name, write)


def _patch_actor_calls(injector: Injector, module: Any) -> None:
    real = module.ActorMethod._remote

    @wraps(real)
    def remote(method: Any, *arguments: Any, **options: Any) -> Any:
        return injector.around("ray", method._method_name, lambda: real(method, *arguments, **options))

    module.ActorMethod._remote = remote


def _patch_worker(injector: Injector, module: Any) -> None:
    worker = module.ModelWorker
    for name in (*FORWARD_KINDS, *CALL_KINDS):
        setattr(worker, name, _watched(injector, name, getattr(worker, name)))


def _watched(injector: Injector, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the model worker whose calls, or whose forward passes, are counted."""

    def forward(_module: Any, _arguments: Any) -> None:
        kind = getattr(injector.inside, "kind", None)
        if kind is not None:
            injector.around(kind, f"a forward pass in {kind}", lambda: None)

    @wraps(method)
    def call(worker: Any, *arguments: Any, **options: Any) -> Any:
        if name in CALL_KINDS:
            result = injector.around(name, name, lambda: method(worker, *arguments, **options))
            if name == "load":
                for body in _bodies(worker):
                    body.register_forward_pre_hook(forward)
            return result
        injector.inside.kind = name
        try:
            return method(worker, *arguments, **options)
        finally:
            injector.inside.kind = None

    return call


def _bodies(worker: Any) -> list[Any]:
    """Every body whose forward calls are passes: training calls it without the head, rollout through the model."""
    models = [worker.policy, getattr(worker.rollout_engine, "_model", None)]
    models += [part.model for part in [worker.reference] if part is not None]
    models += [part.critic.body for part in [worker.critic] if part is not None]
    return list({id(model.base_model): model.base_model for model in models if model is not None}.values())


class _AfterImport:
    """Calls a function with a module right after it was imported for the first time."""

    def __init__(self, then: dict[str, Callable[[Any], None]]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The usual spec, whose loader does a little more; None for every other module."""
        if name not in self._then:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute, then = spec.loader.exec_module, self._then[name]

            def exec_module(module: Any) -> None:
                execute(module)
                then(module)

            spec.loader.exec_module = exec_module
        return spec


def install(folder: str, role: str) -> None:
    """Patch this process, which is a `role` (driver | worker) of a run with a plan in `folder`."""
    injector = Injector(folder, role)
    _patch_files(injector)
    then: dict[str, Callable[[Any], None]] = {
        "safetensors.torch": lambda module: _patch_writer(injector, module, "save_file"),
        "pyarrow.parquet": lambda module: _patch_writer(injector, module, "write_table"),
    }
    if role == "driver":
        _patch_ledger(injector)
        then["ray.actor"] = lambda module: _patch_actor_calls(injector, module)
    else:
        then["moonshift.infra.workers.model"] = lambda module: _patch_worker(injector, module)
    finder: Any = _AfterImport(then)
    sys.meta_path.insert(0, finder)
