"""10,000 samples through the reward pool, with 1 % that hang, 1 % that crash and 1 % that return rubbish.

    python bench/rewards.py [--samples 10000] [--timeout 10] [--processes 2]

Prints one JSON line and exits with 1 when the bar is missed: every other sample has its own score, the wall time is
below 2 × the timeout + the work (the same samples without faults, in the same pool), and no process is left behind.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from moonshift.core.config.schema import RewardSection
from moonshift.core.rewards.graded import Graded
from moonshift.core.types import Prompt, Sample
from moonshift.infra.rewards import RewardPool

REWARD = '''
import ctypes, os

def score(sample):
    """About a millisecond of work, then what the sample asks for."""
    total = sum(number * number for number in range(20_000))
    kind, number = sample.response.split()
    if kind == "hang":
        while True:
            total += 1
    if kind == "crash":
        os.abort() if int(number) % 2 else ctypes.string_at(0)
    if kind == "rubbish":
        return [None, float("nan"), "1.0", [1.0], object(), {"other": 1.0}][int(number) % 6]
    return float(number)
'''
FAULTS = {7: "hang", 41: "crash", 83: "rubbish"}
"""which sample of each hundred has which"""


def samples(count: int, *, faults: bool) -> list[Sample]:
    made = []
    for number in range(count):
        kind = FAULTS.get(number % 100, "good") if faults else "good"
        text = f"prompt {number}"
        prompt = Prompt(
            uid=f"bench:{number}",
            messages=({"role": "user", "content": text},),
            text=text,
            answer=str(number),
            source="bench",
            extra={},
        )
        made.append(Sample(prompt=prompt, response=f"{kind} {number}", finish_reason="stop", response_tokens=8))
    return made


def num_wrong(graded: Sequence[Graded], given: Sequence[Sample]) -> int:
    """Samples that have another result than they must have."""
    wrong = 0
    for result, sample in zip(graded, given, strict=True):
        kind, number = sample.response.split()
        wrong += result.components != ({"score": float(number)} if kind == "good" else None)
    return wrong


def measure(count: int, timeout_s: float, processes: int) -> dict[str, float | int | bool]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reward.py"
        file.write_text(REWARD, encoding="utf-8")
        reward = RewardSection(function=f"{file}:score", timeout_s=timeout_s, processes_per_worker=processes)  # pyright: ignore[reportCallIssue]
        before = {process.pid for process in psutil.Process().children(recursive=True)}
        with RewardPool(reward) as pool:
            clean, faulty = samples(count, faults=False), samples(count, faults=True)
            started = time.perf_counter()
            wrong = num_wrong(pool.grade(clean), clean)
            work_s = time.perf_counter() - started
            started = time.perf_counter()
            graded = pool.grade(faulty)
            wall_s = time.perf_counter() - started
            wrong += num_wrong(graded, faulty)
        left = {process.pid for process in psutil.Process().children(recursive=True)} - before
        left |= {process.pid for process in psutil.process_iter(["cmdline"]) if str(file) in str(process.info)}
    bar_s = 2 * timeout_s + work_s
    return {
        "samples": count,
        "processes": processes,
        "cpus": len(os.sched_getaffinity(0)),
        "timeout_s": timeout_s,
        "errors": sum(result.error is not None for result in graded),
        "wrong": wrong,
        "work_s": round(work_s, 2),
        "wall_s": round(wall_s, 2),
        "bar_s": round(bar_s, 2),
        "processes_left": len(left),
        "passed": not wrong and not left and wall_s < bar_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    figures = measure(given.samples, given.timeout, given.processes)
    print(json.dumps(figures))
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
