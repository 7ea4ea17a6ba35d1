"""What reward processes ask of the Linux kernel: to die with their parent, to adopt orphans, limits, clocks."""

import ctypes
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """End this process by SIGKILL when the thread that started it ends, or now if `parent` is gone already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Take `die_with` back."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, instead of process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def children_of(parent: int) -> list[int]:
    """Process ids; read from every process's status line, since not all kernels list children."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                # the name in brackets may hold anything, a bracket too
                fields = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
                if int(fields.split()[1]) == parent:
                    found.append(int(entry.name))
    return found


def limit_memory(gib: float) -> None:
    """Bound the private memory that this process may take beyond what it has now; no core files either.

    RLIMIT_DATA, not RLIMIT_AS: address space that is only reserved, as CUDA and some allocators do by the terabyte,
    is not memory. Python sees a MemoryError.
    """
    now = 0
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmData:"):
            now = int(line.split()[1]) * 1024
    limit = now + int(gib * 2**30)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def waited_s(pid: int) -> float:
    """Seconds that a process has waited for a CPU while it could have run; 0 where the kernel does not say."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def demote(pid: int) -> None:
    """Let a process have only the CPU time that no other wants."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))


def kill_group(leader: int) -> None:
    """SIGKILL to a process and to those that it started and that did not leave its group."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)
