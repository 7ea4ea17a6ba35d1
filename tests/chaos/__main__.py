"""Campaigns against small runs of the quickstart: `python -m tests.chaos kill --count 5 --seed 1`, from the root."""

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from filelock import FileLock, Timeout

from .comparison import Home, differences, metric_gap, unsound
from .injector import CALL_KINDS, FORWARD_KINDS, KEEPS, KINDS, STORAGE_KINDS, Plan
from .mutants import MUTANTS, survives
from .runs import (
    QUIET_S,
    RESUMES,
    TARGETS,
    Attempt,
    ChaosError,
    Reference,
    Setting,
    kill_at_random,
    make_reference,
    overrides,
    standing_server,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Count = Annotated[int, typer.Option(min=1, help="Runs to strike.")]
Seed = Annotated[int, typer.Option(help="Draws every random choice; one seed, one campaign.")]
Work = Annotated[Path, typer.Option(help="Folder of the campaign: the unbroken run is kept there, and what differs.")]
Moment = Annotated[str, typer.Option(help=f"before | after the call; for write what stays: {' | '.join(KEEPS)}.")]
WORK = Path(".moonshift/chaos")

Strike = Callable[[Path, int], tuple[bool, list[str]]]
"""(folder of the run, its number from 0) → whether it was struck, what differs; it prints what it did."""


@app.callback()
def root(steps: Annotated[int, typer.Option(min=2, help="Steps of each run; before the command's name.")] = 5) -> None:
    """Campaigns against small runs of the quickstart, such as `python -m tests.chaos kill --count 5 --seed 1`."""
    _Length.steps = steps


class _Length:
    """Of the runs of this process: one process, one campaign."""

    steps = 5


@contextmanager
def campaign(work: Path) -> Iterator[tuple[Setting, Reference]]:
    """The standing server and the unbroken run; one campaign at a time uses a working folder."""
    work = work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what runs is cleaned up
    try:
        with FileLock(work / ".lock", timeout=0), standing_server(work) as server:
            setting = Setting(work=work, overrides=overrides(_Length.steps), server=server)
            yield setting, make_reference(setting)
    except Timeout as error:
        raise typer.BadParameter(f"{work} is used by another campaign; wait for it or name another --work.") from error
    except ChaosError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def strike_all(setting: Setting, name: str, count: int, strike: Strike, verdict: str = "identical") -> None:
    """Strike `count` runs one after the other, print how many came out well, and exit 1 unless all did.

    The folder of a run that did not is left where the line says.
    """
    good = missed = 0
    for index in range(count):
        place = setting.work / "runs" / f"{name}-{index + 1}"
        shutil.rmtree(place, ignore_errors=True)
        struck, faults = strike(place, index)
        good += not faults
        missed += not struck
        if not faults:
            shutil.rmtree(place)
        for fault in faults:
            typer.echo(f"    {fault}")
        typer.echo(f"{index + 1}/{count} {f'DIFFERS, see {place}' if faults else verdict}")
    typer.echo(f"{good} of {count} {verdict}" + (f"; {missed} ended before they were struck" if missed else ""))
    raise typer.Exit(0 if good == count else 1)


def resumed(setting: Setting, place: Path) -> list[str]:
    """Go on with a struck run until it ends by itself; what went wrong on the way."""
    faults = []
    for _ in range(RESUMES):
        if Home(place / "home").state == "COMPLETED":  # ended before it was struck, or struck after its last commit
            return faults
        with Attempt(setting, place, None, resume=True) as attempt:
            code = attempt.wait()
            faults += survivors(attempt)
            if code == 0:
                return faults
            faults.append(f"an undisturbed --resume {outcome(code)}: {attempt.last_words()}")
    return faults


def outcome(code: int | None) -> str:
    """An exit code in words."""
    return "hung" if code is None else f"exited with {code}"


def survivors(attempt: Attempt) -> list[str]:
    """A fault where processes outlived their driver."""
    left = attempt.end_survivors(QUIET_S)
    return [f"outlived the driver by {QUIET_S:.0f} s: {', '.join(left)}"] if left else []


def parsed(at: str, action: str, home: Path, role: str = "any") -> Plan:
    """`KIND:NUMBER[:MOMENT]` as a plan for the run below `home`.

    Raises:
        typer.BadParameter: where it cannot be read.
    """
    kind, _, rest = at.partition(":")
    number, _, moment = rest.partition(":")
    if not number.isdigit() or int(number) < 1:
        raise typer.BadParameter(f"--at {at}: write KIND:NUMBER[:MOMENT], such as write:17:half or rename:3:after.")
    when: dict[str, Any] = {"keep" if kind == "write" else "moment": moment} if moment else {}
    try:
        return Plan(home=str(home), kind=kind, at=int(number), action=action, role=role, **when)
    except ValueError as error:
        raise typer.BadParameter(f"--at {at}: {error}") from error


@app.command()
def kill(
    count: Count = 5,
    seed: Seed = 1,
    kills: Annotated[int, typer.Option(min=1, help="Kills in each run; the second hits the resumed attempt.")] = 1,
    target: Annotated[str, typer.Option(help=" | ".join(TARGETS))] = "driver",
    at: Annotated[str, typer.Option(help="KIND:NUMBER[:MOMENT] instead of random moments; see count.")] = "",
    work: Work = WORK,
) -> None:
    """SIGKILL runs, let them resume, and compare them with the unbroken one: exit 1 unless all are identical."""
    if target not in TARGETS or (at and target == "head"):
        raise typer.BadParameter(f"--target is {target}; allowed are {', '.join(TARGETS)}, and no head with --at.")
    if at:
        parsed(at, "kill", work)
    with campaign(work) as (setting, reference):

        def strike(place: Path, index: int) -> tuple[bool, list[str]]:
            faults: list[str] = []
            struck = False
            with ExitStack() as attempts:  # resumed at once, while what the kill left behind may still be ending
                for number in range(kills):
                    plan = parsed(at, "kill", place / "home", target) if at else None
                    attempt = attempts.enter_context(Attempt(setting, place, plan, resume=number > 0))
                    random = Random(f"{seed}/{index}/{number}")
                    hit = kill_at_random(attempt, reference, random, target) if plan is None else ""
                    code = attempt.wait()
                    hit = attempt.struck or hit
                    struck |= bool(hit)
                    typer.echo(f"  killed {hit or 'nothing, it ended first'}; {outcome(code)}")
                    attempts.callback(lambda ended=attempt: faults.extend(survivors(ended)))
                    if code is None:
                        faults.append(f"the struck run hung: {attempt.last_words()}")
                    if code == 0:
                        break
                faults += resumed(setting, place)
            return struck, faults + differences(Home(place / "home"), reference.home)

        strike_all(setting, "kill", count, strike)


@app.command()
def count(work: Work = WORK) -> None:
    """How many calls of each kind the unbroken run makes, in all and in each step."""
    with campaign(work) as (_, reference):
        columns = range(0, _Length.steps + 1)
        typer.echo(f"{'kind':12}{'all':>6}" + "".join(f"{f'step {step}':>8}" for step in columns))
        for kind in KINDS:
            spans = [len(reference.numbers(kind, step)) for step in columns]
            typer.echo(f"{kind:12}{sum(spans):6}" + "".join(f"{span:8}" for span in spans))
        typer.echo("--at takes a number counted over the whole run; sweep takes a step.")


@app.command()
def sweep(
    kind: Annotated[str, typer.Option(help=" | ".join(KINDS))] = "rename",
    step: Annotated[int, typer.Option(min=0, help="Strike the calls made while this step ran.")] = 3,
    stride: Annotated[int, typer.Option(min=1, help="Every so many calls.")] = 1,
    moment: Moment = "",
    work: Work = WORK,
) -> None:
    """SIGKILL one run at each call of a kind in one step, resume, and compare: exit 1 unless all are identical."""
    parsed(f"{kind}:1:{moment}", "kill", work)
    with campaign(work) as (setting, reference):
        numbers = reference.numbers(kind, step)[::stride]
        if not numbers:
            raise typer.BadParameter(f"step {step} of the unbroken run makes no call of kind {kind}; see count.")

        def strike(place: Path, index: int) -> tuple[bool, list[str]]:
            plan = parsed(f"{kind}:{numbers[index]}:{moment}", "kill", place / "home")
            with Attempt(setting, place, plan) as attempt:
                code = attempt.wait()
                typer.echo(f"  killed {attempt.struck or f'nothing at {kind} {plan.at}'}; {outcome(code)}")
                faults = resumed(setting, place) + survivors(attempt)
            return bool(attempt.struck), faults + differences(attempt.home, reference.home)

        strike_all(setting, f"sweep-{kind}", len(numbers), strike)


@app.command()
def disk(
    count: Count = 3,
    seed: Seed = 1,
    at: Annotated[str, typer.Option(help="KIND:NUMBER[:MOMENT]; random numbers of a random kind without it.")] = "",
    error: Annotated[str, typer.Option(help="enospc | eio")] = "enospc",
    work: Work = WORK,
) -> None:
    """Let one write, fsync, rename or commit of each run fail; it must stop in order, go on and end the same.

    A full disk PAUSES the run, and the message says so; any other error may fail it. No half-written file stays.
    """
    parsed(at or "write:1", error, work)
    with campaign(work) as (setting, reference):

        def strike(place: Path, index: int) -> tuple[bool, list[str]]:
            where = at or _drawn(Random(f"{seed}/{index}"), reference)
            with Attempt(setting, place, parsed(where, error, place / "home")) as attempt:
                code = attempt.wait()
                typer.echo(f"  {error}: {attempt.struck or f'nothing at {where}'}; {outcome(code)}")
                faults = survivors(attempt)
            if attempt.struck and code != 0:
                faults += [f"after the fault, {fault}" for fault in unsound(attempt.home)]
                state, words = attempt.home.state, attempt.last_words()
                if error == "enospc" and state not in ("PAUSED", "") and "commit" not in attempt.struck:
                    faults.append(f"the run is {state}, not PAUSED: {words}")
                if "Traceback" in words:
                    faults.append(f"a traceback was shown: {words}")
            faults += resumed(setting, place)
            return bool(attempt.struck), faults + differences(attempt.home, reference.home)

        strike_all(setting, "disk", 1 if at else count, strike)


def _drawn(random: Random, reference: Reference) -> str:
    """A storage call of the unbroken run."""
    calls = [call for call in reference.calls if call[0] in STORAGE_KINDS]
    kind = random.choice(sorted({call[0] for call in calls}))
    number = random.choice([call[1] for call in calls if call[0] == kind])
    return f"{kind}:{number}" + (f":{random.choice(KEEPS)}" if kind == "write" else "")


@app.command()
def oom(
    kind: Annotated[str, typer.Option(help=" | ".join((*FORWARD_KINDS, *CALL_KINDS)))] = "update",
    at: Annotated[int, typer.Option(min=1, help="Number of the forward pass, or of the call.")] = 3,
    always: Annotated[bool, typer.Option("--always", help="At every one from there on: the run must FAIL.")] = False,
    tolerance: Annotated[float, typer.Option(help="Largest relative difference of a training metric.")] = 1e-6,
    work: Work = WORK,
) -> None:
    """Let the memory run out in the model worker: once, and the run ends as the unbroken one; always, and it fails."""
    if kind not in (*FORWARD_KINDS, *CALL_KINDS):
        raise typer.BadParameter(f"--kind is {kind}; allowed are {', '.join((*FORWARD_KINDS, *CALL_KINDS))}.")
    with campaign(work) as (setting, reference):

        def strike(place: Path, _index: int) -> tuple[bool, list[str]]:
            plan = Plan(home=str(place / "home"), kind=kind, at=at, action="oom", role="worker", always=always)
            with Attempt(setting, place, plan) as attempt:
                code = attempt.wait()
                typer.echo(f"  out of memory: {attempt.struck or f'nothing at {kind} {at}'}; {outcome(code)}")
                faults = survivors(attempt)
            words = attempt.last_words()
            if not attempt.struck:
                return False, [*faults, f"the run makes no {kind} {at}"]
            if always:
                typer.echo(f"  {words}")
                state = attempt.home.state
                named = state == "FAILED" and kind in words
                return True, faults + ([] if named else [f"{state}, not FAILED over {kind}"])
            if code != 0:
                return True, [*faults, f"the run did not live through it: {words}"]
            gap, where = metric_gap(attempt.home, reference.home)
            typer.echo(f"  largest difference {gap:.2g} at {where}")
            faults += [] if gap <= tolerance else [f"{where} differs by {gap:.2g}"]
            return True, faults + unsound(attempt.home)

        strike_all(setting, "oom", 1, strike, "as expected")


@app.command()
def mutants(
    only: Annotated[str, typer.Option(help="Those whose name contains this text.")] = "",
) -> None:
    """Break each promise on purpose, in a copy of the sources: exit 1 unless tests go red for every one."""
    chosen = [mutant for mutant in MUTANTS if only in mutant.name]
    alive = []
    for number, mutant in enumerate(chosen, start=1):
        with tempfile.TemporaryDirectory() as folder:
            reason = survives(mutant, Path(folder))
        typer.echo(f"{number:3} {'SURVIVES' if reason else 'found out'}: {mutant.name}")
        alive += [reason] if reason else []
    typer.echo(f"{len(chosen) - len(alive)} of {len(chosen)} found out")
    if alive:
        typer.echo("\n".join(alive), err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
