"""All rows of the data files of a config: prompts, and those that are none with the reason.

Invariant: prompts + dropped = rows; a prompt's uid follows from its file and its place in it, whatever is dropped.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ..errors import DataError
from ..types import Prompt
from .folders import expand
from .formats import MAX_REPORTED, BrokenRow, Row, read_rows
from .report import DroppedRow
from .rows import Columns, RowFaultError, find, to_prompt
from .sources import nearest, parse_source, source_rows

Progress = Callable[[str, int, int], None]
"""what is done, how much of it, of how much"""


def silent(what: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompts:
    """What the files hold."""

    prompts: list[Prompt]
    dropped: list[DroppedRow]
    entries: list[int]
    """for each prompt the place of its entry in `data.train_files`; entries come in order"""
    files: dict[str, str]
    """the file of each label: a uid is `label:row`"""

    @property
    def num_rows(self) -> int:
        return len(self.prompts) + len(self.dropped)


def read_prompts(entries: Sequence[str], columns: Columns, progress: Progress = silent) -> ReadPrompts:
    """Every row of every file of every entry, in order.

    Raises DataError: an entry that names nothing that can be read, a file with no row, or a column that no row of a
    file has.
    """
    files = [(place, file) for place, entry in enumerate(entries) for file in expand(entry)]
    labels = _labels([file for _, file in files])
    read = ReadPrompts(prompts=[], dropped=[], entries=[], files={})
    for number, ((place, file), label) in enumerate(zip(files, labels, strict=True)):
        progress("reading files", number, len(files))
        read.files[label] = file
        _read_file(file, label, columns, read)
        read.entries.extend([place] * (len(read.prompts) - len(read.entries)))
    progress("reading files", len(files), len(files))
    return read


def refuse_dropped(dropped: Sequence[DroppedRow], num_rows: int) -> None:
    """Raise DataError with how many rows cannot be used and the first five, where there are any."""
    if dropped:
        shown = "\n  ".join(map(str, dropped[:MAX_REPORTED]))
        first = f" (the first {MAX_REPORTED} are shown)" if len(dropped) > MAX_REPORTED else ""
        raise DataError(
            f"{len(dropped)} of {num_rows} rows cannot be used. Mend or remove them, or set data.on_bad_row=skip"
            f"{first}:\n  {shown}"
        )


def _read_file(file: str, label: str, columns: Columns, read: ReadPrompts) -> None:
    spec = parse_source(file)
    if spec is None or spec.scheme == "hub":
        name, rows = (label, read_rows(file)) if spec is None else _hub(file)
        _require_columns(file, rows, columns)
        of_file = columns
    else:
        generated = source_rows(spec)
        name, rows = generated.name, generated.rows
        of_file = Columns(system_prompt=columns.system_prompt)
    for index, row in enumerate(rows):
        if isinstance(row, BrokenRow):
            read.dropped.append(
                DroppedRow(file=file, row=index, column="", kind=row.kind, fault=row.reason, line=row.line)
            )
            continue
        try:
            read.prompts.append(to_prompt(row, of_file, uid=f"{label}:{index}", source=name))
        except RowFaultError as fault:
            reason = str(fault).removeprefix(f"column {fault.column}: ")
            read.dropped.append(DroppedRow(file=file, row=index, column=fault.column, kind=fault.kind, fault=reason))


def _hub(file: str) -> tuple[str, Sequence[Row | BrokenRow]]:
    spec = parse_source(file)
    assert spec is not None
    found = source_rows(spec)
    return found.name, found.rows


def _labels(files: Sequence[str]) -> list[str]:
    """A short name for each file that no other has."""
    paths = [file if parse_source(file) else PurePath(file) for file in files]
    repeated = [str(path) for path, times in Counter(paths).items() if times > 1]
    if repeated:
        raise DataError(f"{repeated[0]} is named twice in the data files. Name it once.")
    depth = dict.fromkeys(paths, 1)
    while True:
        labels = {path: _label(path, depth[path]) for path in paths}
        clashing = {label for label, times in Counter(labels.values()).items() if times > 1}
        if not clashing:
            return [labels[path] for path in paths]
        for path in paths:
            depth[path] += labels[path] in clashing


def _label(path: str | PurePath, depth: int) -> str:
    return path if isinstance(path, str) else "/".join(path.parts[-depth:])


def _require_columns(file: str, rows: Sequence[Row | BrokenRow], columns: Columns) -> None:
    if not rows:
        raise DataError(f"{file}: has no rows. Add rows or take the file off data.*_files.")
    whole = [row for row in rows if not isinstance(row, BrokenRow)]
    if not whole:
        return  # each of them is named as broken
    wanted = {"data.prompt_key": columns.prompt_key}
    if not any("reward_model" in row for row in whole):
        wanted["data.answer_key"] = columns.answer_key
    for option, key in wanted.items():
        if any(find(row, key)[0] for row in whole):
            continue
        present = dict.fromkeys(name for row in whole for name in row)
        raise DataError(
            f"{file}: no row has the column {key!r}{nearest(key, present)}. Columns: "
            f"{', '.join(map(repr, present)) or 'none'}. Set {option} to the right one."
        )
