"""Servers that run beside Moonshift: Prefect's, one a home, started and found again by us; MLflow's for its pages.

Invariants: a home has at most one server of a name; every process of it bears a mark in its environment, so that a
stranger is never taken for it and never stopped; a server that nobody asked to stand is gone, with all its children,
when its last living client releases it.
"""

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import psutil
from filelock import FileLock, Timeout

from moonshift.core.errors import ServiceError

from .files import storage_errors, write_text
from .offline import completed_environment
from .server_process import end_processes, find_process, free_port, listens, log_tail, port_obstacle, responds
from .server_programs import PREFECT, ServerProgram, ServerStatus

_MARK = "MOONSHIFT_SERVER"
_POLL_S = 0.1
_LOCK_WAIT_S = 60.0
_MAX_STARTS = 3
_instances = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The state file: which process was started, and where it listens."""

    pid: int
    create_time: float
    port: int
    url: str
    standing: bool


class StandingServer:
    """This process's share in a home's server.

    Example: `with StandingServer(home).begin() as server: …other start-up work…; url = server.wait_ready()`.
    """

    def __init__(self, home: Path, *, port: int | None = None, program: ServerProgram = PREFECT) -> None:
        """Nothing is started yet; without a port the operating system chooses one."""
        self._home = home.resolve()
        self._folder = self._home / "services"
        self._state = self._folder / f"{program.name}.json"
        self._clients = self._folder / "clients"
        self.log = self._folder / f"{program.name}.log"
        self._port = port
        self._program = program
        self._client: Path | None = None
        self._external: str | None = None
        self._starts = 0

    def begin(self, *, standing: bool = False) -> Self:
        """Start the server in the background, or join the one that runs, as a client; returns at once.

        `standing` starts one (or makes the running one) that stays when its clients go, and makes no client.

        Raises:
            ServiceError: when a fixed port is taken, or the server runs already at another one.
            StorageError: when the home cannot be written.
        """
        self._external = self._users_server()
        if self._external or self._client:
            return self
        with self._lock():
            if not standing:
                self._client = self._add_client()
            try:
                record = self._living() or self._spawn(standing)
                if self._port not in (None, record.port):
                    raise ServiceError(
                        f"Port {self._port} was asked for, but the {self._program.title} of {self._home} runs already "
                        f"at port {record.port} (process {record.pid}); stop it first or leave the port out."
                    )
                if standing and not record.standing:
                    self._write(replace(record, standing=True))
            except BaseException:
                self._remove_client()
                raise
        return self

    def wait_ready(self, deadline_s: float = 180.0) -> str:
        """Wait until the server works; returns the URL for clients.

        Raises:
            ServiceError: when it dies or does not answer in time; nothing of it is left then, except for other clients.
        """
        end = time.monotonic() + deadline_s
        try:
            while True:
                url = self._external or self._require_living().url
                if self._answers(url):
                    return url
                if time.monotonic() > end:
                    raise ServiceError(self._silence(url, deadline_s))
                time.sleep(_POLL_S)
        except BaseException:
            self.release()
            raise

    def revived(self, deadline_s: float = 180.0) -> str | None:
        """The URL of the server that this process is a client of, started again if it has died; None: the user's own.

        Raises:
            ServiceError: as `wait_ready`.
        """
        if self._client is None:
            return None
        if self._living() is None:
            with self._lock():
                if self._living() is None:
                    self._spawn(standing=False)
        return self.wait_ready(deadline_s)

    def release(self) -> None:
        """Leave the server; the last living client stops one that does not stand. Safe to call twice.

        Raises:
            ServiceError: when a process of the server cannot be ended.
        """
        if self._client is None:
            return
        with self._lock():
            self._remove_client()
            record = self._living()
            if not (record and record.standing) and not self._living_clients():
                self._clear()

    def stop(self) -> bool:
        """End the server, whoever uses it; whether there was one.

        Raises:
            ServiceError: when a process of the server cannot be ended.
        """
        if not self._folder.is_dir():
            return False
        with self._lock():
            return self._clear()

    def status(self) -> ServerStatus:
        """What runs now; changes nothing."""
        external = self._users_server()
        if external:
            page = external.removesuffix(self._program.api_path)
            return ServerStatus(title=self._program.title, state="external", log=self.log, url=external, page=page)
        record = self._living()
        if record is None:
            return ServerStatus(title=self._program.title, state="stopped", log=self.log)
        return ServerStatus(
            title=self._program.title,
            state="ready" if self._answers(record.url) else "starting",
            log=self.log,
            url=record.url,
            page=record.url.removesuffix(self._program.api_path),
            pid=record.pid,
            standing=record.standing,
            clients=len(self._living_clients()),
        )

    def __enter__(self) -> Self:
        return self.begin()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _users_server(self) -> str | None:
        """The URL that the user set, unless it is this home's own."""
        variable = self._program.url_variable
        url = (os.environ.get(variable) or "").rstrip("/") if variable else ""
        record = self._living() if url else None
        return None if record and record.url == url else url or None

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with storage_errors(self._folder):
            self._clients.mkdir(parents=True, exist_ok=True)
            try:
                lock = FileLock(self._folder / f"{self._program.name}.lock", timeout=_LOCK_WAIT_S).acquire()
            except Timeout as error:
                raise ServiceError(
                    f"Another process has been starting or stopping the {self._program.title} of {self._home} for more "
                    f"than {_LOCK_WAIT_S:.0f} s; it holds {error.lock_file}. End that process and try again."
                ) from error
        with lock:
            yield

    def _living(self) -> _Record | None:
        """The state file's record if the very process that it names lives."""
        try:
            record = _Record(**json.loads(self._state.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        process = find_process(record.pid, record.create_time)
        return record if process and self._is_ours(process) else None

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == str(self._state)
        except (psutil.Error, OSError):
            return False

    def _spawn(self, standing: bool) -> _Record:
        """Start the program in a session of its own; whatever an earlier one left behind goes first."""
        self._clear()
        port = self._port or free_port()
        obstacle = port_obstacle(port)
        if obstacle:
            raise ServiceError(
                f"Port {port} for the {self._program.title} cannot be used: {obstacle}. End what uses it, choose "
                "another port, or leave the port out to have a free one chosen."
            )
        environment = completed_environment(self._home, os.environ)
        environment |= {_MARK: str(self._state), "PYTHONUNBUFFERED": "1"}
        if self._program.url_variable:
            environment.pop(self._program.url_variable, None)  # a server that is given it serves pages that ask there
        arguments = [sys.executable, *self._program.arguments(port)]
        with storage_errors(self.log):
            if self.log.exists():
                self.log.replace(self.log.with_suffix(".log.1"))
            pid = os.posix_spawn(  # unlike Popen it leaves no object that must outlive the child
                sys.executable,
                arguments,
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, str(self.log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP],  # a shell's & ignores SIGINT for all below it
            )
        self._starts += 1
        try:
            process = psutil.Process(pid)
            record = _Record(
                pid=pid,
                create_time=process.create_time(),
                port=port,
                url=f"http://127.0.0.1:{port}{self._program.api_path}",
                standing=standing,
            )
            # for an instant after its start a process shows no environment yet
            while find_process(pid, record.create_time) and not self._is_ours(process):
                time.sleep(0.001)
            self._write(record)
        except BaseException:
            self._clear()
            raise
        return record

    def _write(self, record: _Record) -> None:
        write_text(self._state, json.dumps(asdict(record)) + "\n")

    def _require_living(self) -> _Record:
        """The running server; one that lost its chosen port to another program between choice and use starts again."""
        record = self._living()
        if record:
            return record
        with self._lock():
            record = self._living()
            if record:
                return record
            last = log_tail(self.log)
            if self._port is None and self._starts < _MAX_STARTS and "already in use" in last:
                return self._spawn(standing=self._client is None)
            self._clear()
        raise ServiceError(f"The {self._program.title} ended before it was ready. Its log, {self.log}, ends:\n{last}")

    def _answers(self, url: str) -> bool:
        """Whether the server works and, for ours, is the one that listens there and not a stranger."""
        if self._external:
            return responds(f"{url}/health", any_status=True)
        record = self._living()
        root = url.removesuffix(self._program.api_path)
        return responds(root + self._program.health_path) and record is not None and listens(record.pid, record.port)

    def _silence(self, url: str, deadline_s: float) -> str:
        if self._external:
            return (
                f"{self._program.url_variable}={url} did not answer within {deadline_s:.0f} s; start that server, or "
                f"unset {self._program.url_variable} to have a local one started."
            )
        return (
            f"The {self._program.title} did not answer at {url} within {deadline_s:.0f} s; is the machine busy? "
            f"Its log, {self.log}, ends:\n{log_tail(self.log)}"
        )

    def _add_client(self) -> Path:
        me = psutil.Process()
        path = self._clients / f"{self._program.name}-{me.pid}-{next(_instances)}.json"
        write_text(path, json.dumps({"pid": me.pid, "create_time": me.create_time()}) + "\n")
        return path

    def _remove_client(self) -> None:
        if self._client:
            self._client.unlink(missing_ok=True)
            self._client = None

    def _living_clients(self) -> list[Path]:
        return [path for path in self._clients.glob(f"{self._program.name}-*.json") if _client_lives(path)]

    def _clear(self) -> bool:
        """End every process that bears the mark, then remove the state and the dead clients; whether any was found."""
        leader = self._living()
        bearers = [process for process in psutil.process_iter() if self._is_ours(process)]
        if bearers:
            end_processes(bearers, leader.pid if leader else None)
            survivors = [process for process in psutil.process_iter() if self._is_ours(process)]
            end_processes(survivors, None)  # born while their parent was ending
        self._state.unlink(missing_ok=True)
        for path in set(self._clients.glob(f"{self._program.name}-*.json")) - set(self._living_clients()):
            path.unlink(missing_ok=True)
        return bool(bearers)


def acquire(home: Path, *, deadline_s: float = 180.0, program: ServerProgram = PREFECT) -> StandingServer:
    """A working server with this process as its client; `release` it, or use it in a `with`.

    Raises:
        ServiceError: when it does not start or answer in time.
    """
    server = StandingServer(home, program=program).begin()
    server.wait_ready(deadline_s)
    return server


def start_standing(
    home: Path, *, port: int | None = None, deadline_s: float = 180.0, program: ServerProgram = PREFECT
) -> ServerStatus:
    """Start a server that stays until `stop`, wait until it works, and say where it is.

    Raises:
        ServiceError: when the port is taken, or the server does not start or answer in time.
    """
    server = StandingServer(home, port=port, program=program).begin(standing=True)
    try:
        server.wait_ready(deadline_s)
    except BaseException:
        found = server.status()
        if found.state == "starting" and not found.clients:
            server.stop()
        raise
    return server.status()


def stop(home: Path, *, program: ServerProgram = PREFECT) -> bool:
    """End the home's server; whether there was one."""
    return StandingServer(home, program=program).stop()


def status(home: Path, *, program: ServerProgram = PREFECT) -> ServerStatus:
    """What runs for the home now."""
    return StandingServer(home, program=program).status()


def _client_lives(path: Path) -> bool:
    try:
        return find_process(**json.loads(path.read_text(encoding="utf-8"))) is not None
    except (FileNotFoundError, ValueError, TypeError):
        return False
