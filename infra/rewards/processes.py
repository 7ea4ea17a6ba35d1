"""The pool's side of its processes: how they are started, spoken to, and known to have ended."""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from moonshift.core.config.schema import RewardSection
from moonshift.core.errors import RewardError, StageError

from . import kernel
from .template import LONGEST_ORDER
from .wire import HEADER, LARGEST_RESULT, Distrust

_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); from moonshift.infra.rewards.template import main; main()"
)
_END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Samples that one process grades at once, by their place in the batch."""

    number: int
    rows: tuple[int, ...]
    limit_s: float
    tries: int = 0
    """how often it was lost through no fault of its own"""


@dataclass(slots=True, kw_only=True, eq=False)
class Grader:
    """One process that grades."""

    channel: socket.socket
    pid: int | None = None
    """None until the template has said it"""
    is_ready: bool = False
    calls: deque[Call] = field(default_factory=deque)
    """handed over and not answered; it works on the first"""
    since: float = 0.0
    """time.monotonic() when it began the first, or when it was started"""
    waited_s: float = 0.0
    """what it had waited for a CPU by then"""
    asked_at: float = 0.0
    """time.monotonic() when `own_s` was last of interest"""
    is_aside: bool = False
    """counts as no process of the pool any more; its deadline runs on"""
    is_demoted: bool = False
    reason: str | None = None
    """why the pool has ended it"""
    closed_at: float | None = None
    """time.monotonic() when its end of the connection was closed"""
    unread: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)

    @property
    def is_active(self) -> bool:
        """Whether it takes calls, now or when it is ready."""
        return not self.is_aside and self.reason is None and self.closed_at is None

    @property
    def call(self) -> Call | None:
        """What it works on."""
        return self.calls[0] if self.calls else None

    def begins(self) -> None:
        """Note the time: it works on its first call from now on."""
        self.since = time.monotonic()
        self.waited_s = kernel.waited_s(self.pid) if self.pid else 0.0

    @property
    def own_s(self) -> float:
        """Seconds of its own since then: those in which it waited for a CPU left out."""
        return time.monotonic() - self.since - (kernel.waited_s(self.pid) - self.waited_s if self.pid else 0.0)

    def send(self, data: bytes) -> None:
        """Queue a frame and send what goes at once."""
        self.unsent += data
        self.flush()

    def flush(self) -> None:
        """Send what goes without waiting; a closed end shows when it is read."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self.unsent:
                del self.unsent[: self.channel.send(self.unsent)]

    def messages(self) -> tuple[list[dict[str, Any]], bool]:
        """Whole messages that have arrived, and whether its end is closed. Raises Distrust on what is no message."""
        closed = False
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    part = self.channel.recv(2**20)
                except ConnectionResetError:
                    part = b""
                if not part:
                    closed = True
                    break
                self.unread += part
                if len(self.unread) > LARGEST_RESULT:
                    raise Distrust("its process sent too much")
        return self._cut(), closed

    def _cut(self) -> list[dict[str, Any]]:
        found = []
        while len(self.unread) >= HEADER.size:
            length = HEADER.unpack_from(self.unread)[0]
            if length > LARGEST_RESULT:
                raise Distrust("its process sent what is no message")
            if len(self.unread) < HEADER.size + length:
                break
            try:
                message = json.loads(self.unread[HEADER.size : HEADER.size + length])
            except (ValueError, RecursionError) as error:
                raise Distrust("its process sent what is no message") from error
            if not isinstance(message, dict):
                raise Distrust("its process sent what is no message")
            del self.unread[: HEADER.size + length]
            found.append(message)
        return found


class Processes:
    """The template and all graders forked from it, on one selector."""

    def __init__(self, reward: RewardSection, start_timeout_s: float) -> None:
        """Raises RewardError when the reward cannot be loaded, StageError when its process ends or hangs in that."""
        self._reward = reward
        self._start_timeout_s = start_timeout_s
        self._count = 0
        self.living: dict[int, Grader] = {}
        """by a number of ours"""
        self.selector = selectors.DefaultSelector()
        self._start()

    def _start(self) -> None:
        loaded = self._launch(fresh=False)
        if "threads" in loaded:
            self._end_template()
            loaded = self._launch(fresh=True)
        self.together: int | None = loaded["together"]
        """samples of one call, 0: all; None: unknown until a grader has said it"""

    def _launch(self, *, fresh: bool) -> dict[str, Any]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            path = json.dumps([os.path.abspath(each) for each in sys.path])
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(theirs.fileno()), str(os.getpid()), path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # NumPy's BLAS would start its threads on import, and what has threads cannot be forked
                env={"OPENBLAS_NUM_THREADS": "1"} | os.environ,
                start_new_session=True,  # Ctrl-C is for the run, which then ends us
            )
        self._control = ours
        ours.settimeout(self._start_timeout_s)
        answer: dict[str, Any] | None = None
        try:
            ours.send(json.dumps({"reward": self._reward.model_dump(mode="json"), "fresh": fresh}).encode())
            answer = json.loads(ours.recv(LONGEST_ORDER) or "null")
        except TimeoutError:
            self._end_template()
            raise StageError(
                f"{self._reward.function} was not loaded within {self._start_timeout_s:g} s; raise "
                "recovery.start_timeout_s, or find what its module does while it is imported."
            ) from None
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has ended, which the code says better
        if answer is None or "failed" in answer:
            code = self._end_template()
            if answer:
                raise RewardError(answer["failed"])
            raise StageError(f"The process that loads {self._reward.function} {ending(code)} while it was loaded.")
        ours.setblocking(False)
        self.selector.register(ours, selectors.EVENT_READ, None)
        return answer

    def add(self) -> Grader:
        """Ask for one more grader."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._count += 1
            grader = Grader(channel=ours, since=time.monotonic())
            ours.setblocking(False)
            self.living[self._count] = grader
            self.selector.register(ours, selectors.EVENT_READ, self._count)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a lost template shows when it is read
                socket.send_fds(self._control, [json.dumps({"number": self._count}).encode()], [theirs.fileno()])
        return grader

    def told(self) -> list[tuple[int, Grader, int]] | None:
        """Graders that have ended, with their numbers and exit codes (negative: a signal), to be forgotten.

        None: the template has ended.
        """
        ended = []
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    text = self._control.recv(LONGEST_ORDER)
                except ConnectionResetError:
                    text = b""
                if not text:
                    return None
                message = json.loads(text)
                if "pid" in message:
                    self._named(message["number"], message["pid"])
                    continue
                ended += [
                    (number, grader, message["code"])
                    for number, grader in self.living.items()
                    if grader.pid == message["gone"]
                ]
        return ended

    def _named(self, number: int, pid: int) -> None:
        grader = self.living[number]
        grader.pid = pid
        if grader.reason is not None:
            kernel.kill_group(pid)

    def end(self, grader: Grader, reason: str) -> None:
        """SIGKILL; that it has ended is told later."""
        self.silence(grader)
        grader.reason = grader.reason or reason
        if grader.pid is not None:
            kernel.kill_group(grader.pid)

    def silence(self, grader: Grader) -> None:
        """Listen to it no more."""
        with contextlib.suppress(KeyError):
            self.selector.unregister(grader.channel)

    def forget(self, number: int) -> None:
        """Close our end; the process has ended."""
        grader = self.living.pop(number)
        self.silence(grader)
        grader.channel.close()

    def restart(self) -> list[Grader]:
        """A new template after one was lost; returns the graders that went with it."""
        lost = list(self.living.values())
        self._end_all()
        self._start()
        return lost

    def close(self) -> None:
        """End every process and wait for that."""
        self._end_all()
        self.selector.close()

    def _end_all(self) -> None:
        if self._process.poll() is not None:  # else it ends them itself, who knows which number is still whose
            for grader in self.living.values():
                if grader.pid is not None:
                    kernel.kill_group(grader.pid)
        for number in list(self.living):
            self.forget(number)
        self._end_template()

    def _end_template(self) -> int:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(self._control)
        self._control.close()  # it ends by that, and takes everything below it along
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def ending(code: int) -> str:
    """How a process ended, in words: an exit code, or the name of a signal where it is negative."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in {each.value for each in signal.Signals} else f"signal {-code}"
    hint = " (by the kernel for want of memory, or by hand)" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
