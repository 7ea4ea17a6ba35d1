"""Sources, `scheme:TASK?key=value&…`, to rows: made by a rule, or read from the hub.

Invariant: a source string fixes its rows (a hub's: with `revision`); none reads a clock or an unseeded generator.
`+` stands for itself in a value; write %26 for &, %23 for #, %25 for %.
"""

import difflib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import unquote

from ..errors import DataError
from .formats import Row, plain
from .hub import hub_rows
from .permutation import shuffled

SEED_STRIDE = 1_000_000
"""Reasoning Gym draws row i from seed + i: seeds 1 and 2 would share all rows but one. Ours are this far apart."""
MAX_ADDEND = 999
VERIFIER_TAG = "reasoning_gym"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """A parsed source. Example: `sums:?max=99` has scheme "sums", task "" and parameters {"max": "99"}."""

    text: str
    scheme: str
    task: str
    parameters: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """What a source gives: its rows in the plain schema (`prompt`, `answer`, further columns) and its short name."""

    name: str
    rows: list[Row]


def parse_source(text: str) -> SourceSpec | None:
    """The parts of a source string; None where `text` is no source but a path.

    Raises DataError on an unknown scheme or a parameter that is no `key=value`, or is given twice.
    """
    match = re.fullmatch(r"([A-Za-z][\w-]+):([^?]*)(?:\?(.*))?", text)
    if match is None or match[2].startswith(("/", "\\")):
        return None
    scheme, task, query = match[1], match[2], match[3] or ""
    if scheme not in SOURCES:
        raise DataError(f"{text}: unknown source {scheme!r}{nearest(scheme, SOURCES)}. Sources: {', '.join(SOURCES)}.")
    parameters: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise DataError(f"{text}: {part!r} is no parameter; write key=value, with & between them.")
        if key in parameters:
            raise DataError(f"{text}: {key} is given twice.")
        parameters[key] = unquote(value)
    return SourceSpec(text=text, scheme=scheme, task=task, parameters=parameters)


def source_rows(spec: SourceSpec) -> SourceRows:
    """All rows of a source. Raises DataError naming the parameter, the value and what is allowed."""
    return SOURCES[spec.scheme](spec)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'?`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _sums(spec: SourceSpec) -> SourceRows:
    """Pairs a + b, 0 ≤ a, b ≤ max, cut into three disjoint parts by one seeded permutation.

    `val` is the first `held_out` pairs, `warm` the next `warm`, `train` the rest: parts are disjoint between strings
    with the same max, seed, held_out and warm.
    """
    allowed = ("max", "split", "held_out", "warm", "seed", "size")
    refuse_unknown(spec, spec.parameters, allowed)
    if spec.task:
        raise DataError(f"{spec.text}: sums has no tasks; write sums:?max=99&split=train.")
    largest = _whole(spec, "max", 99, 1, MAX_ADDEND)
    num_pairs = (largest + 1) ** 2
    held_out = _whole(spec, "held_out", min(256, num_pairs // 4), 0, num_pairs)
    warm = _whole(spec, "warm", 0, 0, num_pairs - held_out)
    order = shuffled(num_pairs, _whole(spec, "seed", 0, 0, 2**64 - 1), 0)
    parts = {
        "train": order[held_out + warm :],
        "val": order[:held_out],
        "warm": order[held_out : held_out + warm],
    }
    split = spec.parameters.get("split", "train")
    if split not in parts:
        raise DataError(f"{spec.text}: split is {split!r}; use one of {', '.join(parts)}.")
    part = parts[split]
    if not part:
        raise DataError(
            f"{spec.text}: the split {split!r} is empty: {num_pairs} pairs, held_out={held_out}, warm={warm}. "
            f"Change held_out or warm."
        )
    size = _whole(spec, "size", len(part), 1, len(part))
    pairs = (divmod(code, largest + 1) for code in part[:size])
    return SourceRows(name="sums", rows=[{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs])


def _reasoning_gym(spec: SourceSpec) -> SourceRows:
    """A task of Reasoning Gym; `reasoning_gym` in each row holds what its own verifier needs.

    Raises DataError where the package or the task is missing, a parameter does not fit, or the task's verifier
    cannot score a stored row (tasks with no single answer, or with answers that are no plain values).
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError(f"{spec.text}: the package reasoning-gym is not installed: pip install reasoning-gym.")
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if spec.task not in DATASETS:
        hint = nearest(spec.task, DATASETS) or f". Tasks: {', '.join(sorted(DATASETS))}"
        raise DataError(f"{spec.text}: Reasoning Gym has no task {spec.task!r}{hint}")
    dataset = _gym_dataset(spec, DATASETS[spec.task])
    rows = [_gym_row(spec.task, dataset[index]) for index in range(len(dataset))]
    answer, entry = rows[0]["answer"], gym_entry(rows[0])
    if not isinstance(answer, str) or get_score_answer_fn(spec.task)(answer, entry) != 1.0:  # pyright: ignore[reportCallIssue]
        raise DataError(
            f"{spec.text}: row 0 has no single answer that the task's verifier takes from a stored row; "
            f"choose another task than {spec.task!r}."
        )
    return SourceRows(name=f"reasoning_gym/{spec.task}", rows=rows)


def gym_entry(row: Row) -> dict[str, Any]:
    """The entry that a Reasoning Gym verifier wants, from a row with the columns prompt, answer, reasoning_gym."""
    return {"question": row["prompt"], "answer": row["answer"], "metadata": row[VERIFIER_TAG]["metadata"]}


def _gym_row(task: str, entry: dict[str, Any]) -> Row:
    return {
        "prompt": entry["question"],
        "answer": entry["answer"],
        VERIFIER_TAG: {"task": task, "metadata": plain(entry["metadata"])},
    }


def _gym_dataset(spec: SourceSpec, registered: tuple[Any, Any]) -> Any:
    dataset_class, config_class = registered
    allowed = [field.name for field in fields(config_class)]
    refuse_unknown(spec, spec.parameters, allowed)
    arguments = {key: _value(value) for key, value in spec.parameters.items()}
    arguments["size"] = _whole(spec, "size", 500, 1, SEED_STRIDE)
    # some tasks draw from NumPy, whose seeds end at 2^32
    arguments["seed"] = _whole(spec, "seed", 0, 0, 2**32 // SEED_STRIDE - 1) * SEED_STRIDE
    try:
        config = config_class(**arguments)
        config.validate()
        return dataset_class(config=config)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"{spec.text}: Reasoning Gym refuses the parameters: {error}.") from error


def refuse_unknown(spec: SourceSpec, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise DataError at the first parameter that is not among those allowed."""
    names = list(allowed)
    for name in given:
        if name not in names:
            raise DataError(
                f"{spec.text}: unknown parameter {name!r}{nearest(name, names)}. Parameters: {', '.join(names)}."
            )


def _whole(spec: SourceSpec, name: str, default: int, low: int, high: int) -> int:
    given = spec.parameters.get(name, str(default))
    if not re.fullmatch(r"\d{1,20}", given, flags=re.ASCII) or not low <= int(given) <= high:
        raise DataError(f"{spec.text}: {name} is {given!r}; it must be a whole number from {low} to {high}.")
    return int(given)


def _value(text: str) -> Any:
    """JSON where the text is JSON (2, true, ["+"]), else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


SOURCES: dict[str, Callable[[SourceSpec], SourceRows]] = {
    "sums": _sums,
    "reasoning_gym": _reasoning_gym,
    "hub": hub_rows,
}
