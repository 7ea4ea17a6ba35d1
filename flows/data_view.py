"""`moonshift check-data`: what becomes of every row, before anything is started."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from moonshift.core.config import load_config
from moonshift.core.config.schema import DataSection
from moonshift.core.datasets.reading import Progress as Report
from moonshift.core.datasets.report import CONTROL_TOKEN, OVERLONG, DataReport, histogram, listed, summary
from moonshift.infra.preflight import Prepared, look_at_data

LISTED = 10
BAR = 40
"""characters of the histogram's longest bar"""


def check(path: Path | None, overrides: tuple[str, ...], *, as_json: bool) -> bool:
    """Print the tables, or one JSON object; whether a run would take the data.

    Raises:
        ConfigError, DataError, ModelError: what keeps the rows from being looked at at all.
    """
    loaded = load_config(path, overrides)
    with progress_bar(Console(stderr=True)) as progress:
        reports = [item.report for item in look_at_data(loaded, progress)]
    reports = [report for report in reports if report.rows]
    data = loaded.config.data
    verdicts = {report.name: faults(report, data) for report in reports}
    if as_json:
        sets = {
            report.name: report.detail()
            | {"histogram": histogram(report.lengths), "refused": verdicts[report.name], "roles": _roles(report)}
            for report in reports
        }
        print(json.dumps(sets, indent=1, ensure_ascii=False))
    else:
        console = Console()
        for report in reports:
            show(report, console)
            for fault in verdicts[report.name]:
                console.print(f"{report.name}: a run is refused: {fault}", style="bold", markup=False, soft_wrap=True)
    return not any(verdicts.values())


def faults(report: DataReport, data: DataSection) -> list[str]:
    """Why a run would not take the set; none: it would."""
    overlong = sum(row.kind == OVERLONG for row in report.dropped)
    bad = len(report.dropped) - overlong
    found = []
    if bad and data.on_bad_row == "error":
        found.append(f"{bad} rows cannot be used; mend them or set data.on_bad_row=skip")
    if overlong and data.on_overlong == "error":
        found.append(
            f"{overlong} prompts are longer than data.max_prompt_length={data.max_prompt_length}; raise it or set "
            "data.on_overlong=filter, left or right"
        )
    if report.name == "train" and report.used < data.train_batch_size:
        found.append(f"{report.used} usable rows are fewer than data.train_batch_size={data.train_batch_size}")
    return found


def show(report: DataReport, console: Console) -> None:
    """One set: rows, reasons, sources, lengths, and each pattern of roles through the template."""
    table = Table(title=report.name, box=box.SIMPLE, title_justify="left", title_style="bold", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("rows", f"{report.rows:,}")
    table.add_row("used", f"{report.used:,}")
    for reason, count in report.reasons().items():
        table.add_row(f"dropped, {escape(reason)}", f"{count:,}")
    if report.left_out:
        table.add_row("left out by data.val_max_samples", f"{report.left_out:,}")
    table.add_row("cut to data.max_prompt_length", f"{report.truncated:,}")
    table.add_row("duplicates (same turns, used all the same)", f"{report.duplicates:,}")
    table.add_row("control tokens in the text of a row", f"{_controls(report):,}")
    for source, count in sorted(report.sources.items(), key=lambda item: -item[1])[:LISTED]:
        table.add_row(f"source {escape(source)}", f"{count:,}")
    for name, value in summary(report.lengths).items():
        table.add_row(f"tokens, {name}", f"{value:,}")
    console.print(table)
    _show_lengths(report, console)
    for pattern in report.patterns[:LISTED]:
        roles = ", ".join(pattern.roles)
        console.print(f"turns {roles}: {pattern.rows:,} rows, such as {pattern.uid}", markup=False, soft_wrap=True)
        rendered = "(cannot be rendered: see the reasons)" if pattern.rendered is None else pattern.rendered
        console.print("  " + rendered.replace("\n", "\n  "), markup=False, soft_wrap=True, highlight=False)
    if report.dropped:
        console.print(listed("dropped:", report.dropped, LISTED), markup=False, soft_wrap=True, highlight=False)


def show_losses(prepared: Prepared, console: Console) -> None:
    """One line for each set of a run that is not used as it is."""
    for report in (prepared.train.report, prepared.validation.report, prepared.examples.report):
        if report.dropped or report.truncated:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in report.reasons().items())
            console.print(
                f"{report.name}: {report.used} of {report.rows} rows are used, {report.truncated} of them cut"
                + (f"; dropped: {reasons}" if reasons else ""),
                markup=False,
                soft_wrap=True,
            )


@contextmanager
def progress_bar(console: Console) -> Iterator[Report]:
    """A bar for each part of the work, on a terminal; it goes away at the end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report


def _show_lengths(report: DataReport, console: Console) -> None:
    bins = histogram(report.lengths)
    most = max((count for *_, count in bins), default=0)
    for low, high, count in bins:
        bar = "█" * round(BAR * count / most) or ("▏" if count else "")
        console.print(f"  {low:>6}-{high:<6} {bar} {count:,}", highlight=False)


def _controls(report: DataReport) -> int:
    return sum(row.kind == CONTROL_TOKEN for row in report.dropped)


def _roles(report: DataReport) -> list[dict[str, object]]:
    return [
        {"roles": pattern.roles, "rows": pattern.rows, "uid": pattern.uid, "rendered": pattern.rendered}
        for pattern in report.patterns
    ]
