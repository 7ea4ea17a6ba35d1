"""What a person sees while a run goes on: a live view on a terminal, or one line a step for logs."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

SHOWN = {
    "critic/score/mean": "reward",
    "val/score/mean": "held-out",
    "actor/loss": "loss",
    "actor/grad_norm": "grad norm",
    "actor/entropy": "entropy",
    "response_length/mean": "length",
    "rollout/tokens_per_s": "tokens/s",
}


class Silent:
    """Shows nothing; the base that counts time."""

    def __init__(self) -> None:
        self.steps = 0
        self.first_step = 1
        self.began = time.monotonic()
        self.latest: dict[str, float] = {}

    def started(self, run_id: str, first_step: int, steps: int) -> None:
        self.steps, self.first_step, self.began = steps, first_step, time.monotonic()

    def stage_started(self, step: int, stage: str) -> None:
        """A stage's work begins."""

    def stage_ended(self, step: int, stage: str, metrics: dict[str, float]) -> None:
        self.latest |= {label: metrics[key] for key, label in SHOWN.items() if key in metrics}

    def seconds_left(self, step: int) -> float | None:
        """Estimate from the steps of this attempt; None before the first has ended."""
        done = step - self.first_step + 1
        return (time.monotonic() - self.began) / done * (self.steps - step) if done > 0 else None

    def numbers(self) -> str:
        return "  ".join(f"{label} {value:.4g}" for label, value in self.latest.items())


class Plain(Silent):
    """One line a step on standard error."""

    def started(self, run_id: str, first_step: int, steps: int) -> None:
        super().started(run_id, first_step, steps)
        print(f"run {run_id}: steps {first_step} to {steps}", file=sys.stderr, flush=True)

    def stage_started(self, step: int, stage: str) -> None:
        if step == 0:
            print(f"step 0: {stage} …", file=sys.stderr, flush=True)

    def stage_ended(self, step: int, stage: str, metrics: dict[str, float]) -> None:
        super().stage_ended(step, stage, metrics)
        if stage == "update":
            left = self.seconds_left(step)
            text = f"  left {_clock(left)}" if left is not None else ""
            print(f"step {step}/{self.steps}  {self.numbers()}{text}", file=sys.stderr, flush=True)
        elif stage == "validate":
            print(f"step {step}: held-out {self.latest['held-out']:.4f}", file=sys.stderr, flush=True)


class OnTerminal(Silent):
    """A progress bar and the latest numbers, redrawn in place."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.progress = Progress(
            TextColumn("[bold]{task.fields[run]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[stage]:<12}"),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            console=console,
        )
        self.task = self.progress.add_task("", run="starting", stage="workers", left="–", total=None)

    def started(self, run_id: str, first_step: int, steps: int) -> None:
        super().started(run_id, first_step, steps)
        self.progress.update(self.task, run=run_id, total=steps, completed=first_step - 1)

    def stage_started(self, step: int, stage: str) -> None:
        self.progress.update(self.task, stage=stage)

    def stage_ended(self, step: int, stage: str, metrics: dict[str, float]) -> None:
        super().stage_ended(step, stage, metrics)
        if stage == "update":
            left = self.seconds_left(step)
            self.progress.update(self.task, completed=step, left=_clock(left) if left is not None else "–")

    def __rich__(self) -> Table:
        table = Table.grid()
        table.add_row(self.progress)
        table.add_row(self.numbers())
        return table


@contextmanager
def open_display(kind: str) -> Iterator[Silent]:
    """`live` (plain where there is no terminal), `plain` or `none`."""
    console = Console(stderr=True)
    if kind == "live" and console.is_terminal:
        view = OnTerminal(console)
        with Live(view, console=console, refresh_per_second=4):
            yield view
    elif kind == "none":
        yield Silent()
    else:
        yield Plain()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
