"""A box around one program: what goes in, what comes out, and how well it holds.

Invariant: when `run` returns, no process of the program is left, and the result says how it was protected. A box that
cannot be built is an error, never a quietly weaker box.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from moonshift.core.errors import RewardError

_LAUNCHER = Path(__file__).with_name("launch.py")
_END_S = 5.0


class Protection(StrEnum):
    """How well a box holds."""

    NAMESPACES = "namespaces"
    """no network, no file of the host but the system's own programs, no other process, and the limits"""
    LIMITS = "limits"
    """limits, an empty environment and an empty folder; the network is open, and every file and process that the
    user may reach can be reached"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The limits of one program."""

    timeout_s: float = 5.0
    """of wall time; CPU time is bounded by the same, in whole seconds"""
    memory_mib: int = 512
    """address space of each of its processes"""
    processes: int = 16
    """processes and threads at once"""
    files_mib: int = 16
    """all its files together (in the mode limits: each)"""
    output_kib: int = 1024
    """of each of its two outputs"""
    allow_weak: bool = False
    """run with `Protection.LIMITS` where the system permits no namespaces"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended."""

    code: int | None
    """exit code, negative for a signal; None: it was ended from outside, see `limit`"""
    output: str
    errors: str
    limit: str | None
    """which limit it met from outside: time or output"""
    protection: Protection


def run(program: str, text: str = "", box: Box | None = None) -> Outcome:
    """Run a Python program (standard library only) on `text` as its standard input.

    Raises:
        RewardError: the box cannot be built here; the message says why and what can be done.
    """
    box = Box() if box is None else box
    outcome, refused = _run(program, text, box, Protection.NAMESPACES)
    if outcome is None and box.allow_weak:
        outcome, refused = _run(program, text, box, Protection.LIMITS)
    if outcome is None:
        raise RewardError(
            f"Untrusted code cannot be boxed in here: {refused}. Let this user make namespaces (root, or "
            "kernel.unprivileged_userns_clone=1 and user.max_user_namespaces > 0), or set allow_weak, with which "
            "the code can reach the network and every file that this user can."
        )
    return outcome


def _run(program: str, text: str, box: Box, mode: Protection) -> tuple[Outcome | None, str]:
    order = {
        "mode": mode,
        "program": program,
        "python": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
        "python_home": os.path.realpath(sys.base_prefix),
        "memory_mib": box.memory_mib,
        "files_mib": box.files_mib,
        "processes": box.processes,
        "cpu_s": max(1, round(box.timeout_s + 0.5)),
    }
    with _launched(order) as (process, result):
        limit, output, errors = _communicate(process, text.encode(errors="surrogatepass"), box)
        if limit:
            # the launcher's end is the end of a namespace; without one it has to tidy up
            process.send_signal(signal.SIGKILL if mode is Protection.NAMESPACES else signal.SIGTERM)
        process.wait(_END_S)
        said = json.loads(result.read() or "{}")
    if "refused" in said:
        return None, said["refused"]
    return Outcome(
        code=None if limit else said.get("code"),
        output=output,
        errors=errors,
        limit=limit,
        protection=mode,
    ), ""


@contextmanager
def _launched(order: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[bytes], IO[str]]]:
    """The launcher, told its order with a folder of its own, and what it will say."""
    read_order, write_order = os.pipe()
    read_result, write_result = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_LAUNCHER), str(read_order), str(write_result)],
            env={},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[read_order, write_result],
            start_new_session=True,
        )
    finally:
        os.close(read_order)
        os.close(write_result)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="moonshift-box-", ignore_cleanup_errors=True) as folder,
            os.fdopen(read_result, encoding="utf-8") as result,
            process,
        ):
            with suppress(BrokenPipeError), os.fdopen(write_order, "w", encoding="utf-8") as file:
                json.dump(order | {"folder": folder}, file)
            yield process, result
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _communicate(process: subprocess.Popen[bytes], text: bytes, box: Box) -> tuple[str | None, str, str]:
    """Feed and read until both outputs end or a limit is met: the limit, and what was written."""
    assert process.stdin and process.stdout and process.stderr
    written: dict[int, bytearray] = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    deadline = time.monotonic() + box.timeout_s
    limit = None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        os.set_blocking(process.stdin.fileno(), False)
        for number in written:
            selector.register(number, selectors.EVENT_READ)
        open_outputs, sent = len(written), 0
        while open_outputs and limit is None:
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                if key.fileobj is process.stdin:
                    sent = _feed(process.stdin, text, sent)
                    if sent == len(text):
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                part = os.read(key.fd, 2**16)
                written[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
                    open_outputs -= 1
                elif len(written[key.fd]) > box.output_kib * 1024:
                    limit = f"more than {box.output_kib} KiB of output"
            if limit is None and open_outputs and time.monotonic() >= deadline:
                limit = f"more than {box.timeout_s:g} s"
    if not process.stdin.closed:
        with suppress(OSError):
            process.stdin.close()
    output, errors = (bytes(each[: box.output_kib * 1024]).decode(errors="replace") for each in written.values())
    return limit, output, errors


def _feed(pipe: IO[bytes], text: bytes, sent: int) -> int:
    """How much has been sent after one more write; all, where nobody reads any more."""
    try:
        return sent + os.write(pipe.fileno(), text[sent : sent + 2**16])
    except BlockingIOError:
        return sent
    except BrokenPipeError:
        return len(text)
