"""The stack of a process that does not answer, written by itself on a signal: also while C code holds it."""

import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import IO

_WAIT_S = 5.0
_open: list[IO[str]] = []
"""kept open: the handler writes to the file's number"""


def enable(folder: Path) -> int:
    """Write the stacks of all threads to `folder` on SIGUSR1 from now on; returns this process's id."""
    folder.mkdir(parents=True, exist_ok=True)
    file = _place(folder, os.getpid()).open("w", encoding="utf-8")
    _open.append(file)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    return os.getpid()


def dump(folder: Path, pid: int) -> str:
    """Ask a process of this machine for its stacks; what it wrote, or why there is nothing."""
    place = _place(folder, pid)
    try:
        os.kill(pid, signal.SIGUSR1)
    except (ProcessLookupError, PermissionError) as error:
        return f"process {pid} gave no stack: {error}"
    deadline = time.monotonic() + _WAIT_S
    text = ""
    while time.monotonic() < deadline:
        before, text = text, place.read_text(encoding="utf-8", errors="replace") if place.exists() else ""
        if text and text == before:
            return text
        time.sleep(0.2)
    return text or f"process {pid} wrote no stack within {_WAIT_S:.0f} s"


def _place(folder: Path, pid: int) -> Path:
    return folder / f"{pid}.txt"
