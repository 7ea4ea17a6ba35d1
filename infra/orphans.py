"""The processes of an attempt's local cluster are noted, so that the next attempt can end those that outlived it.

A driver that is killed cannot stop its cluster. The kernel ends Ray's head with it and most of the rest follows within
seconds, but a worker that is stuck in a kernel call or was stopped stays, and with it the GPU memory that it holds, and
two of Ray's agents try for a minute to tell a head that is gone.

Invariant: only a process is ended that was seen below this run's driver, by its id and start time, on this machine, and
whose driver has ended. The note is a view of what runs: one that is lost or torn costs time, never a result.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray

from .home import home
from .server_process import find_process, kill_processes, lives

log = logging.getLogger(__name__)

_RAY = str(Path(ray.__file__).parent)
"""In the command line of each process of Ray's head; a Prefect server, which stays, is our child too."""
_FIRST_LOOK_S = 0.5
_LAST_LOOK_S = 30.0
"""Pauses between looks double from the first to the last: most processes start with the attempt."""
_END_S = 10.0


def note_of(run_id: str) -> Path:
    """Where the processes of a run are noted, one a line below those of who wrote it."""
    return home() / "processes" / f"{run_id}.jsonl"


def end_orphans(run_id: str) -> list[str]:
    """SIGKILL what the last attempt of a run left behind here, and wait for its end; returns names with ids.

    Nothing is done while that attempt's driver lives, nor where it was on another machine.
    """
    lines = _read(note_of(run_id))
    if not lines or lines[0].get("place") != _place() or _found(lines[0]) is not None:
        return []
    ended = _end([process for line in lines[1:] if (process := _found(line)) is not None])
    if ended:
        log.warning("the last attempt of run %s left processes behind, ended now: %s", run_id, ", ".join(ended))
    return ended


@contextmanager
def noted_processes(run_id: str, ours: str = _RAY) -> Iterator[None]:
    """Within, this process's children with `ours` in their command line are noted, and all below them; those of them
    that outlive the context are ended. Entered before they are started, left after they were stopped."""
    note = _Note(note_of(run_id), ours)
    note.begin()
    try:
        yield
    finally:
        note.end()


class _Note:
    """The file, and the thread that looks."""

    def __init__(self, path: Path, ours: str) -> None:
        self._path, self._ours = path, ours
        self._seen: dict[int, psutil.Process] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_again, name="process-note", daemon=True)

    def begin(self) -> None:
        driver = psutil.Process()
        self._write([{"place": _place(), **_identity(driver)}], "w")
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._look()  # a last time: what was started since the last pause
        _end([process for process in self._seen.values() if lives(process)])
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _look_again(self) -> None:
        pause_s = _FIRST_LOOK_S
        while not self._ended.wait(pause_s):
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
            self._look()

    def _look(self) -> None:
        new: list[dict[str, object]] = []
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if self._ours not in " ".join(child.cmdline()):
                    continue
                for process in [child, *child.children(recursive=True)]:
                    if process.pid not in self._seen:
                        self._seen[process.pid] = process
                        new.append(_identity(process))
        self._write(new, "a")

    def _write(self, lines: list[dict[str, object]], mode: str) -> None:
        """Not flushed to the disk: after a crash of the machine there is nothing to end."""
        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open(mode, encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            log.warning("processes are not noted in %s: %s", self._path, error)


def _end(processes: list[psutil.Process]) -> list[str]:
    """SIGKILL them and all below them, and wait for their end; returns their names with ids."""
    below = list(processes)
    for process in processes:
        with suppress(psutil.Error):
            below += process.children(recursive=True)
    names = []
    for process in set(below):
        with suppress(psutil.Error):
            names.append(f"{process.name()} ({process.pid})")
    if left := kill_processes(list(set(below)), _END_S):
        log.warning("processes that SIGKILL did not end in %.0f s: %s", _END_S, [process.pid for process in left])
    return names


def _identity(process: psutil.Process) -> dict[str, object]:
    return {"pid": process.pid, "started": process.create_time()}


def _found(line: dict[str, object]) -> psutil.Process | None:
    """The process of a line, if it still runs."""
    pid, started = line.get("pid"), line.get("started")
    if not isinstance(pid, int) or not isinstance(started, float):
        return None
    return find_process(pid, started)


def _place() -> list[str]:
    """Where process ids mean what they mean here: the machine, its boot, and the kernel's namespace of ids."""
    place = [socket.gethostname()]
    with suppress(OSError):
        place.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        place.append(os.readlink("/proc/self/ns/pid"))
    return place


def _read(path: Path) -> list[dict[str, object]]:
    """Lines of a note; a torn one, at the end, is left out."""
    lines: list[dict[str, object]] = []
    with suppress(OSError, ValueError):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if isinstance(line, dict):
                lines.append(line)
    return lines
