"""Memory at named places: a peak belongs to its stage."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moonshift.infra.workers.memory_log import MemoryLog

GIB = 2**30
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@contextmanager
def held(bytes_: int, device: str) -> Iterator[None]:
    """Memory that is fresh and is given back: an allocator may serve from what an earlier test has freed."""
    if device == "cuda":
        taken = torch.ones(bytes_, dtype=torch.uint8, device=device)
        yield
        del taken
        return
    with mmap.mmap(-1, bytes_) as pages:
        for _ in range(0, bytes_, 2**20):
            pages.write(b"\1" * 2**20)
        yield


def peaks(log: MemoryLog, stage: str, bytes_: int, device: str) -> float:
    log.begin(stage)
    with held(bytes_, device):
        log.at("full")
    found = log.end()
    what = "allocated_gb" if device == "cuda" else "rss_gb"
    assert found[f"memory/full/{what}"] >= found[f"memory/before_{stage}/{what}"] + 0.9 * bytes_ / GIB
    assert found[f"memory/after_{stage}/{what}"] < found[f"memory/full/{what}"]
    return found[f"memory/{stage}/peak_{what}"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_peak_is_its_own_stages_and_a_steps_is_the_largest(device: str) -> None:
    log = MemoryLog(torch.device(device))
    large, small = peaks(log, "rollout", GIB // 2, device), peaks(log, "update", GIB // 16, device)
    assert large - small > 0.3
    key = f"perf/max_memory_{'allocated' if device == 'cuda' else 'rss'}_gb"
    found = log.step()
    assert found[key] == pytest.approx(large)
    assert found["perf/cpu_memory_used_gb"] > 0
    assert log.step().keys() == {"perf/cpu_memory_used_gb"}  # the next step begins anew


@ON_GPU[0]
@ON_GPU[1]
def test_a_device_has_what_is_reserved_and_what_all_take() -> None:
    log = MemoryLog(torch.device("cuda"))
    log.begin("update")
    with held(GIB // 4, "cuda"):
        found = log.end()
    place = "memory/after_update"
    assert found[f"{place}/device_used_gb"] > found[f"{place}/reserved_gb"] >= found[f"{place}/allocated_gb"] >= 0.25
    assert found["memory/update/peak_reserved_gb"] >= found["memory/update/peak_allocated_gb"] >= 0.25
