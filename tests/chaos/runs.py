"""Starts, strikes, resumes and compares small runs of the quickstart, each in a home of its own.

A *reference* is the run that nobody struck; it also counts its calls, so that a sweep knows which there are. It is made
once and kept below the working folder, under a digest of the product's sources and of the run's settings.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from random import Random

import psutil

from .comparison import Home
from .injector import ACTED, CALLS, Plan, write_plan

ROOT = Path(__file__).parent.parent.parent
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
SMALL = (
    "warm_start.steps=20",
    "trainer.test_freq=3",
    "trainer.save_freq=2",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "data.val_max_samples=32",
)
ATTEMPT_S = 400.0
"""An attempt that takes longer hangs."""
QUIET_S = 120.0
"""Ray's agents notice only after a minute that their head is gone, unless the next attempt ends them."""
RESUMES = 3
"""An undisturbed attempt should do; more are tried so that a run which needs two is told from one that never ends."""


class ChaosError(RuntimeError):
    """The harness itself cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all runs of a campaign share."""

    work: Path
    """folder of the campaign, absolute"""
    overrides: tuple[str, ...]
    server: dict[str, str]
    """environment that names the standing Prefect server"""


def overrides(steps: int) -> tuple[str, ...]:
    """Settings of the quickstart's small sibling, of so many steps."""
    return (*SMALL, f"trainer.total_training_steps={steps}")


@contextmanager
def standing_server(work: Path) -> Iterator[dict[str, str]]:
    """One Prefect server for all runs of a campaign; it ends with it.

    Raises:
        ChaosError: when it does not start.
    """
    environment = _environment({"MOONSHIFT_HOME": str(work / "server")})
    started = subprocess.run(
        _command("server", "start"), env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    address = re.search(r"http://127\.0\.0\.1:\d+", started.stdout)
    if address is None:
        raise ChaosError(f"The Prefect server did not start: {started.stdout}{started.stderr}")
    try:
        yield {"PREFECT_API_URL": f"{address.group()}/api"}
    finally:
        subprocess.run(_command("server", "stop"), env=environment, cwd=ROOT, check=True, capture_output=True)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "moonshift.flows.cli", *arguments]


def _environment(more: dict[str, str]) -> dict[str, str]:
    """This process's, without what would send a run to a shared cluster, ledger or server."""
    dropped = ("RAY_ADDRESS", "MOONSHIFT_LEDGER_URL", "PREFECT_API_URL", "MOONSHIFT_CHAOS")
    kept = {key: value for key, value in os.environ.items() if key not in dropped and "MOONSHIFT__" not in key}
    return kept | more


class Reference:
    """The run that nobody struck: what the others are compared with, and how its time and its calls were spent."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder / "home")
        self._calls = folder / "chaos" / CALLS

    @cached_property
    def calls(self) -> list[tuple[str, int, float, str, int, str]]:
        """(kind, number, seconds since the epoch, role, pid, what) of every call."""
        return [tuple(json.loads(line)) for line in self._calls.read_text(encoding="utf-8").splitlines()]

    @cached_property
    def gaps(self) -> list[float]:
        """Seconds from the start to the first commit of a stage, between commits, and from the last one to the end."""
        commits = [at for (at,) in self.home.rows("select committed_at from stages order by committed_at")]
        started = json.loads(self.home.rows("select detail from events where kind = 'attempt' limit 1")[0][0])
        ended = self.home.rows("select ended_at from attempts")[0][0]
        times = [started["process_started"], *commits, ended]
        return [later - earlier for earlier, later in pairwise(times)]

    def numbers(self, kind: str, step: int) -> range:
        """Numbers of the calls of a kind that were made while a step ran: since the last commit of the one before."""
        ends = dict(self.home.rows("select step, max(committed_at) from stages group by step"))
        start = max((at for number, at in ends.items() if number < step), default=0.0)
        end = ends.get(step, 0.0) if step < max(ends) else float("inf")
        found = [number for called, number, at, *_ in self.calls if called == kind and start < at <= end]
        return range(min(found), max(found) + 1) if found else range(0)


def make_reference(setting: Setting) -> Reference:
    """The reference of a campaign, from its folder if it was made there before.

    Raises:
        ChaosError: when the run that nobody strikes does not complete.
    """
    folder = setting.work / f"unbroken-{_digest(setting.overrides)}"
    if not folder.exists():
        making = folder.with_suffix(".making")
        shutil.rmtree(making, ignore_errors=True)
        with Attempt(setting, making, Plan(home=str(making / "home")), folder="chaos") as attempt:
            if attempt.wait() != 0:
                raise ChaosError(f"The run that nobody strikes failed: {attempt.last_words()}")
        making.rename(folder)
    return Reference(folder)


def _digest(settings: tuple[str, ...]) -> str:
    """Of the product's sources as they are now, committed or not, of the harness's injector, and of the settings."""
    digest = hashlib.sha256("\n".join(settings).encode())
    rooms = [path for room in ("core", "infra", "tasks", "flows") for path in (ROOT / room).rglob("*.py")]
    for path in [*sorted(rooms), QUICKSTART, Path(__file__).with_name("injector.py")]:
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Attempt:
    """One process's try at the run in `place/home`; with a plan, it and its workers are struck from within.

    As a context manager it leaves no process behind, whatever happens inside.
    """

    def __init__(
        self, setting: Setting, place: Path, plan: Plan | None, *, folder: str = "", resume: bool = False
    ) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.home = Home(place / "home")
        self._log = place / f"attempt-{len(list(place.glob('attempt-*.log'))) + 1}.log"
        more = {"MOONSHIFT_HOME": str(self.home.folder), **setting.server}
        self._acted: Path | None = None
        if plan is not None:
            chaos = place / (folder or self._log.stem)
            write_plan(str(chaos), plan)
            self._acted = chaos / ACTED
            inject = str(Path(__file__).parent / "inject")
            paths = [inject, *filter(None, [os.environ.get("PYTHONPATH")])]
            more |= {"MOONSHIFT_CHAOS": str(chaos), "PYTHONPATH": os.pathsep.join(paths)}
        arguments = ("train", str(QUICKSTART), *setting.overrides, "--plain", *(["--resume"] if resume else []))
        with self._log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                _command(*arguments), env=_environment(more), cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self.started = time.monotonic()
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *_: object) -> None:
        self.look()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.end_survivors(0.0)

    def look(self) -> list[psutil.Process]:
        """The processes below the driver now; remembered, since they lose their parent when it dies."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(process.pid, process)
        return [process for process in self._seen.values() if is_running(process)]

    def wait(self) -> int | None:
        """The exit code of the driver; None where it hung and was killed."""
        while self.process.poll() is None:
            if time.monotonic() > self.started + ATTEMPT_S:
                self.look()
                self.process.kill()
                self.process.wait()
                return None
            self.look()
            time.sleep(0.2)
        return self.process.returncode

    def end_survivors(self, patience_s: float) -> list[str]:
        """Names of those that still run so long after the driver's end; they are killed then."""
        deadline = time.monotonic() + patience_s
        while (
            left := [process for process in self._seen.values() if is_running(process)]
        ) and time.monotonic() < deadline:
            time.sleep(0.2)
        names = []
        for process in left:
            with suppress(psutil.NoSuchProcess):
                names.append(f"{process.name()} ({process.pid})")
                process.kill()
        return names

    @property
    def struck(self) -> str:
        """What the injector did; empty where it did nothing."""
        if self._acted is None or not self._acted.exists():
            return ""
        # a process that is killed right after it made the file has not written into it
        text = self._acted.read_text(encoding="utf-8") or '["a call", 0, 0, "process", 0, ""]'
        kind, number, _, role, _, what = json.loads(text.splitlines()[0])
        return f"{role} at {kind} {number} ({what})"

    def last_words(self) -> str:
        """The end of what the attempt printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-600:].strip()


def is_running(process: psutil.Process) -> bool:
    """One that ended but was not reaped by the container's first process does not run."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


TARGETS = ("driver", "worker", "head", "any")


def kill_at_random(attempt: Attempt, reference: Reference, random: Random, target: str) -> str:
    """SIGKILL a process at a random moment between two commits of the run; says which, empty where the run ended first.

    The moment is drawn by the run's own progress, not by the clock, so that a slow start of Ray takes one share of
    the kills and not most of them; within it, by the seconds that the reference took there.
    """
    before = attempt.home.num_stages
    after = random.randint(before, len(reference.gaps) - 1)
    delay = random.random() * reference.gaps[0 if after == before else after]
    choice = random.random()
    while attempt.home.num_stages < after:
        attempt.look()
        if attempt.process.poll() is not None or time.monotonic() > attempt.started + ATTEMPT_S:
            return ""
        time.sleep(0.02)
    time.sleep(delay)
    victims = _victims(attempt, target)
    if attempt.process.poll() is not None or not victims:
        return ""
    victim = victims[int(choice * len(victims))]
    with suppress(psutil.NoSuchProcess):
        name = "driver" if victim.pid == attempt.process.pid else victim.name()
        victim.send_signal(signal.SIGKILL)
        return f"{name} {delay:.2f} s after {after} stages"
    return ""


def _victims(attempt: Attempt, target: str) -> list[psutil.Process]:
    """The driver, or the processes of it that a target names, by pid; the driver where none of those is there yet."""
    below = sorted(attempt.look(), key=lambda process: process.pid)
    if attempt.process.poll() is not None:
        return []
    driver = psutil.Process(attempt.process.pid)
    worker, head = ("ray::ModelWorker", "ray::RewardWorker"), ("gcs_server", "raylet")
    names: tuple[str, ...] = {"worker": worker, "head": head, "any": worker + head}.get(target, ())
    chosen = [process for process in below if _title(process).startswith(names)]
    return [driver, *chosen] if target == "any" else chosen or [driver]


def _title(process: psutil.Process) -> str:
    """What a process calls itself: a Ray worker by its class, a server by its program's name."""
    try:
        return os.path.basename((process.cmdline() or [process.name()])[0])
    except psutil.Error:
        return ""
