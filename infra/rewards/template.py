"""The process that loads the rewards once and is forked for each process that grades.

Invariant: it runs the user's code only while it loads, and it has one thread when it forks. It ends, and everything
below it, when the pool's end of its socket closes, whatever closed it.
"""

import gc
import json
import os
import random
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from moonshift.core.config.schema import RewardSection
from moonshift.core.errors import MoonshiftError
from moonshift.core.rewards.reward_set import RewardSet, load_rewards

from . import kernel
from .grading import serve, together

LONGEST_ORDER = 2**18
"""bytes of one message on the control socket"""
_SCAN_EVERY_S = 0.2
_LAST_SCANS = 50


def main() -> None:
    """Load the rewards as the first message says, then fork on request; `argv[1]`: number of the control socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    # its parent waits in one thread for the answer, so until then the thread's end is the parent's
    kernel.die_with(int(sys.argv[2]))
    order = json.loads(control.recv(LONGEST_ORDER))
    reward = RewardSection.model_validate(order["reward"])
    rewards = None
    if not order["fresh"]:
        try:
            rewards = load_rewards(reward)
        except MoonshiftError as error:
            _tell(control, {"failed": str(error)})
            return
        # a thread does not come along in a fork, and what it has locked stays locked
        if len(os.listdir("/proc/self/task")) > 1:
            _tell(control, {"threads": True})
            return
    kernel.adopt_orphans()
    gc.collect()
    gc.freeze()  # pages of what is loaded stay shared
    kernel.outlive_parent()
    _tell(control, {"loaded": True, "together": together(rewards) if rewards else None})
    Template(control, reward, rewards).run()


def _tell(control: socket.socket, message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):
        control.send(json.dumps(message).encode())


class Template:
    """Forks, tells the pool how its processes ended, and ends whatever they leave behind."""

    def __init__(self, control: socket.socket, reward: RewardSection, rewards: RewardSet | None) -> None:
        """`rewards` None: each process loads its own, since loading leaves threads."""
        self._control, self._rewards = control, rewards
        self._reward = reward
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._living: dict[int, int] = {}
        """process id to the descriptor that tells its end"""
        self._has_orphans = False

    def run(self) -> None:
        """Until the pool is gone."""
        while True:
            ready = dict(self._poll.poll(_SCAN_EVERY_S * 1000 if self._has_orphans else None))
            if not ready and self._has_orphans:
                self._has_orphans = False
                self._end_orphans()
            if self._control.fileno() in ready and not self._obey():
                return self._end_all()
            self._reap()

    def _obey(self) -> bool:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, LONGEST_ORDER, 1)
        except ConnectionResetError:
            return False
        if not message:
            return False
        number, channel = json.loads(message)["number"], socket.socket(fileno=descriptors[0])
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                self._become_grader(me, channel)
            finally:
                os._exit(1)
        channel.close()
        with suppress(OSError):
            os.setpgid(pid, pid)  # by both, whoever is first; the session stays, and the scheduler's group with it
        self._living[pid] = os.pidfd_open(pid)
        self._poll.register(self._living[pid], select.POLLIN)
        _tell(self._control, {"number": number, "pid": pid})
        return True

    def _become_grader(self, parent: int, channel: socket.socket) -> None:
        os.setpgid(0, 0)
        kernel.die_with(parent)
        random.seed()  # else all would draw the same numbers
        kernel.limit_memory(self._reward.memory_gib)
        serve(channel, self._reward, self._rewards)
        os._exit(0)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = ended.si_pid
                descriptor = self._living.pop(pid, None)
                if descriptor is not None:
                    kernel.kill_group(pid)  # while its number is still its own
                status = os.waitpid(pid, 0)[1]
                if descriptor is None:
                    continue  # an orphan that was adopted
                self._poll.unregister(descriptor)
                os.close(descriptor)
                self._has_orphans = True
                _tell(self._control, {"gone": pid, "code": os.waitstatus_to_exitcode(status)})

    def _end_orphans(self) -> int:
        orphans = [pid for pid in kernel.children_of(os.getpid()) if pid not in self._living]
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(orphans)

    def _end_all(self) -> None:
        for pid in self._living:
            kernel.kill_group(pid)
        for descriptor in self._living.values():
            os.close(descriptor)
        self._living.clear()
        for _ in range(_LAST_SCANS):  # what an orphan has started is an orphan after it
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not self._end_orphans():
                return
            select.select([], [], [], 0.01)
