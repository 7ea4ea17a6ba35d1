"""Prompts from files and procedural sources, checked before anything is started.

Invariant: every row becomes a Prompt or is named in the error; none disappears.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from ..errors import DataError
from ..types import Prompt
from .formats import MAX_REPORTED, Row, read_rows
from .rows import Columns, RowFaultError, to_prompt
from .sampler import PromptSampler
from .seeds import sample_seed
from .sources import nearest, parse_source, source_rows

__all__ = ["PromptSampler", "load_prompts", "refuse_overlong", "sample_seed"]


def load_prompts(files: Sequence[str], *, prompt_key: str, answer_key: str, system_prompt: str | None) -> list[Prompt]:
    """All prompts of `files`, in order; a prompt's uid is `<file name or source>:<row>`.

    `files`: paths (.jsonl .json .csv .parquet) or sources (`sums:?max=99`, `reasoning_gym:TASK?size=500`). Two files
    with one name are told apart by as much of their paths as that needs. The plain schema (`prompt`, `answer`) and
    verl's (`prompt`, `reward_model.ground_truth`, `data_source`) are both read; every other column goes into `extra`.

    Raises DataError: no file or no row, a file that cannot be read, a missing column, or rows that cannot be used
    (how many, and the first five with row from 0, column and reason).
    """
    if not files:
        raise DataError("No data files are given. Set data.train_files to a list of files or sources.")
    columns = Columns(prompt_key=prompt_key, answer_key=answer_key, system_prompt=system_prompt)
    prompts: list[Prompt] = []
    faults: list[str] = []
    num_rows = 0
    for file, label in zip(files, _labels(files), strict=True):
        spec = parse_source(file)
        if spec is None:
            name, rows = label, read_rows(file)
            _require_columns(file, rows, columns)
            of_file = columns
        else:
            generated = source_rows(spec)
            name, rows = generated.name, generated.rows
            of_file = Columns(prompt_key="prompt", answer_key="answer", system_prompt=system_prompt)
        num_rows += len(rows)
        for index, row in enumerate(rows):
            try:
                prompts.append(to_prompt(row, of_file, uid=f"{label}:{index}", source=name))
            except RowFaultError as fault:
                faults.append(f"{file}: row {index}, {fault}")
    if faults:
        shown = "\n  ".join(faults[:MAX_REPORTED])
        first = f" (the first {MAX_REPORTED} are shown)" if len(faults) > MAX_REPORTED else ""
        raise DataError(f"{len(faults)} of {num_rows} rows cannot be used. Mend or remove them{first}:\n  {shown}")
    return prompts


def refuse_overlong(prompts: Sequence[Prompt], lengths: Sequence[int], max_prompt_length: int) -> None:
    """Raise DataError where a prompt has more than `max_prompt_length` tokens.

    `lengths`: tokens of each rendered prompt, counted by the function that the rollout uses.
    """
    overlong = [
        f"{prompt.uid} ({length} tokens)"
        for prompt, length in zip(prompts, lengths, strict=True)
        if length > max_prompt_length
    ]
    if overlong:
        more = f" and {len(overlong) - MAX_REPORTED} more" if len(overlong) > MAX_REPORTED else ""
        raise DataError(
            f"{len(overlong)} of {len(prompts)} prompts are longer than data.max_prompt_length={max_prompt_length}: "
            f"{', '.join(overlong[:MAX_REPORTED])}{more}. "
            f"Set data.max_prompt_length to at least {max(lengths)}, or shorten or remove these rows."
        )


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


def _require_columns(file: str, rows: Sequence[Row], columns: Columns) -> None:
    if not rows:
        raise DataError(f"{file}: has no rows. Add rows or take the file off data.*_files.")
    present = dict.fromkeys(key for row in rows for key in row)
    wanted = {"data.prompt_key": columns.prompt_key}
    if "reward_model" not in present:
        wanted["data.answer_key"] = columns.answer_key
    for option, key in wanted.items():
        if key not in present:
            raise DataError(
                f"{file}: no row has the column {key!r}{nearest(key, present)}. Columns: "
                f"{', '.join(map(repr, present)) or 'none'}. Set {option} to the right one."
            )
