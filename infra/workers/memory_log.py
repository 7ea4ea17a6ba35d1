"""How much memory a worker holds at named places of a step, and the most that each stage took: metrics in GiB.

Nothing waits for the device: what is read are the allocator's own counters, and the driver's of the whole device.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import psutil
import torch

Arguments = ParamSpec("Arguments")
Metrics = dict[str, float]
_GIB = 2**30
_SELF = Path("/proc/self")


class MemoryLog:
    """Readings of one process; `begin` and `end` enclose a stage, `at` is a place within it.

    On a GPU a place has what PyTorch has allocated and reserved and what of the device all have taken, the rollout
    engine's own allocator included; on a CPU it has the resident set.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stage = ""
        self._found: Metrics = {}
        self._loaded: Metrics = {}
        self._step: Metrics = {}

    def begin(self, stage: str) -> None:
        """Peaks count from here on."""
        self._stage, self._found = stage, {}
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            with suppress(OSError):  # where the kernel does not let it be reset, the peak is the process's
                (_SELF / "clear_refs").write_text("5", encoding="ascii")
        self.at(f"before_{stage}")

    def at(self, place: str) -> None:
        """Note `memory/<place>/…`."""
        self._found |= {f"memory/{place}/{what}": value / _GIB for what, value in self._now().items()}

    def end(self) -> Metrics:
        """What was noted since `begin`, with the stage's peaks."""
        self.at(f"after_{self._stage}")
        for what, value in self._peaks().items():
            self._found[f"memory/{self._stage}/peak_{what}"] = value / _GIB
            key = f"perf/max_memory_{what}"
            self._step[key] = max(value / _GIB, self._step.get(key, 0.0))
        return self._found

    def loaded(self) -> None:
        """End the stage of loading, which belongs to no step: its readings come with every step's.

        A run that was killed and loads again then has the same metrics as one that was not.
        """
        self._loaded, self._step = self.end(), {}

    def step(self) -> Metrics:
        """The peaks over all stages since the last call, and what the whole machine uses; verl's names."""
        found, self._step = self._step, {}
        return found | self._loaded | {"perf/cpu_memory_used_gb": psutil.virtual_memory().used / _GIB}

    def _now(self) -> dict[str, int]:
        if not self._cuda:
            return {"rss_gb": psutil.Process().memory_info().rss}
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated_gb": torch.cuda.memory_allocated(),
            "reserved_gb": torch.cuda.memory_reserved(),
            "device_used_gb": total - free,
        }

    def _peaks(self) -> dict[str, int]:
        if self._cuda:
            return {
                "allocated_gb": torch.cuda.max_memory_allocated(),
                "reserved_gb": torch.cuda.max_memory_reserved(),
            }
        return {"rss_gb": _peak_rss()}


def _peak_rss() -> int:
    """Bytes: the kernel's high-water mark of the resident set; where it keeps none, the resident set as it is."""
    with suppress(OSError):
        for line in (_SELF / "status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss


class HasMemoryLog(Protocol):
    """A worker whose stages are logged."""

    memory: MemoryLog


Worker = TypeVar("Worker", bound=HasMemoryLog)


def log_memory(
    stage: str,
) -> Callable[[Callable[Concatenate[Worker, Arguments], Metrics]], Callable[Concatenate[Worker, Arguments], Metrics]]:
    """Add a stage's readings to the metrics that its method returns."""

    def wrap(
        method: Callable[Concatenate[Worker, Arguments], Metrics],
    ) -> Callable[Concatenate[Worker, Arguments], Metrics]:
        @wraps(method)
        def logged(self: Worker, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
            self.memory.begin(stage)
            metrics = method(self, *args, **kwargs)
            return metrics | self.memory.end()

        return logged

    return wrap
