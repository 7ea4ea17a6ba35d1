"""What a server's keeper asks of the operating system: processes, ports, answers, the end of a log."""

import os
import signal
import socket
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit

import psutil

from moonshift.core.errors import ServiceError

_POLL_S = 0.05
_REQUEST_S = 5.0
_TERM_GRACE_S = 10.0
_REST_GRACE_S = 3.0
_KILL_GRACE_S = 5.0


def find_process(pid: int, create_time: float) -> psutil.Process | None:
    """The process if it lives and is the one that was started then (seconds since the epoch)."""
    try:
        process = psutil.Process(pid)
        # a corrected clock moves the start time of all processes a little
        return process if abs(process.create_time() - create_time) < 1.0 and lives(process) else None
    except (psutil.Error, ValueError):
        return None


def kill_processes(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """SIGKILL to all; those that still live after so long."""
    _signal(processes, signal.SIGKILL)
    return _wait(processes, seconds)


def lives(process: psutil.Process) -> bool:
    """False for a zombie too; it is reaped if it is a child of ours."""
    try:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return True
    except psutil.NoSuchProcess:
        return False
    try:
        os.waitpid(process.pid, os.WNOHANG)
    except ChildProcessError:
        return False
    return False


def end_processes(processes: Sequence[psutil.Process], leader: int | None) -> None:
    """SIGTERM to the leader, which may end the others itself; then to the rest; then SIGKILL to whoever is left.

    Raises:
        ServiceError: naming the processes that SIGKILL did not end in time.
    """
    living = [process for process in processes if process.pid == leader]
    _signal(living, signal.SIGTERM)
    _wait(living, _TERM_GRACE_S)
    living = _wait(processes, 0)
    _signal(living, signal.SIGTERM)
    living = _wait(living, _REST_GRACE_S)
    _signal(living, signal.SIGKILL)
    living = _wait(living, _KILL_GRACE_S)
    if living:
        numbers = ", ".join(str(process.pid) for process in living)
        raise ServiceError(f"Server processes that SIGKILL did not end: {numbers}. See what they wait for (a disk?).")


def _wait(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still live after so long. psutil's own wait holds a stranger's zombie for a living process."""
    end = time.monotonic() + seconds
    living = [process for process in processes if lives(process)]
    while living and time.monotonic() < end:
        time.sleep(_POLL_S)
        living = [process for process in living if lives(process)]
    return living


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def listens(pid: int, port: int) -> bool:
    """Whether the process or a child of it listens at the port."""
    try:
        leader = psutil.Process(pid)
        family = [leader, *leader.children(recursive=True)]
        sockets = [entry for process in family for entry in process.net_connections("tcp")]
    except psutil.Error:
        return False
    return any(entry.status == psutil.CONN_LISTEN and entry.laddr and entry.laddr.port == port for entry in sockets)


def responds(url: str, *, any_status: bool = False) -> bool:
    """Whether a GET is answered by 200 (or at all). Loopback is asked directly, whatever proxy the user has set."""
    local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
    try:
        with opener.open(url, timeout=_REQUEST_S) as answer:
            return any_status or answer.status == 200
    except HTTPError:
        return any_status
    except (OSError, ValueError, HTTPException):
        return False


def free_port() -> int:
    """A loopback port that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def port_obstacle(port: int) -> str | None:
    """Why the loopback port cannot be listened at, or None."""
    if not 0 < port < 65536:
        return "a port is a number from 1 to 65535"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return None


def log_tail(log: Path, count: int = 15) -> str:
    """The last lines of a log that are not blank."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "(no log)"
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:]) or "(empty)"
