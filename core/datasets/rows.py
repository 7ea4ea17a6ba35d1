"""One raw row to a checked Prompt, or to the reason why not.

Invariant: a Prompt has a non-empty last user turn and a right answer; nothing of a row is dropped, all columns but
prompt and answer go into `extra` (a column that only holds one of them under a dotted key goes there too).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import DataError
from ..types import Prompt

Row = Mapping[str, Any]
Turns = tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where prompt, answer and source are, and what is put before each prompt.

    A key is a column's name or, where no column has it, a path through one: `reward_model.ground_truth`.
    """

    prompt_key: str = "prompt"
    answer_key: str = "answer"
    source_key: str = "data_source"
    system_prompt: str | None = None


class RowFaultError(DataError):
    """One row cannot be used; the message is `column NAME: reason`."""

    column: str = ""
    kind: str = ""
    """what is counted: the reason without what differs from row to row"""


def find(row: Row, key: str) -> tuple[bool, Any]:
    """Whether the row has the key, and its value; `a.b` is the key b of the column a where there is no column `a.b`."""
    if key in row:
        return True, row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False, None
        value = value[part]
    return True, value


def to_prompt(row: Row, columns: Columns, *, uid: str, source: str) -> Prompt:
    """The checked Prompt of a row. Raises RowFaultError with column and reason."""
    messages = _messages(row, columns)
    answer, answer_column = _find_answer(row, columns.answer_key)
    _, data_source = find(row, columns.source_key)
    return Prompt(
        uid=uid,
        messages=messages,
        text=[turn["content"] for turn in messages if turn["role"] == "user"][-1],
        answer=_checked_answer(answer, answer_column),
        source=data_source if isinstance(data_source, str) and data_source else source,
        extra={key: value for key, value in row.items() if key not in (columns.prompt_key, columns.answer_key)},
        answer_column=answer_column.rpartition(".")[2],
        chat=isinstance(find(row, columns.prompt_key)[1], list),
    )


def _fault(column: str, reason: str, kind: str = "") -> RowFaultError:
    fault = RowFaultError(f"column {column}: {reason}")
    fault.column, fault.kind = column, kind or reason
    return fault


def _messages(row: Row, columns: Columns) -> Turns:
    key = columns.prompt_key
    present, value = find(row, key)
    if not present:
        raise _fault(key, f"missing; the row has {', '.join(map(repr, row)) or 'no columns'}", "missing")
    if value is None:
        raise _fault(key, "null prompt")
    if isinstance(value, str):
        turns = ({"role": "user", "content": value},)
    elif isinstance(value, list):
        turns = tuple(_turn(turn, place, key) for place, turn in enumerate(value))
    else:
        raise _fault(key, f"{type(value).__name__} {value!r:.60}; a prompt is text or a list of turns", "wrong type")
    asked = [turn["content"] for turn in turns if turn["role"] == "user"]
    if not turns or (asked and not asked[-1].strip()):
        raise _fault(key, "empty prompt")
    if not asked:
        raise _fault(key, "no user turn in the prompt")
    for turn in turns:
        _check_text(turn["content"], key)
    if columns.system_prompt is None:
        return turns
    if turns[0]["role"] == "system":
        raise _fault(key, "has a system turn of its own, and data.system_prompt is set too; unset one of them")
    return ({"role": "system", "content": columns.system_prompt}, *turns)


def _turn(turn: Any, place: int, key: str) -> dict[str, str]:
    if not isinstance(turn, Mapping):
        raise _fault(key, f"turn {place} is a {type(turn).__name__}, not {{role, content}}", "a turn is no object")
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or not role:
        raise _fault(key, f"turn {place} has no role", "a turn has no role")
    if not isinstance(content, str):
        reason = f"turn {place} ({role}) has {type(content).__name__} as content; only text is read"
        raise _fault(key, reason, "a turn's content is no text")
    further = [name for name, value in turn.items() if name not in ("role", "content") and value is not None]
    if further:
        reason = f"turn {place} ({role}) has {', '.join(further)}; only role and content are read"
        raise _fault(key, reason, "a turn has more than role and content")
    return {"role": role, "content": content}


def _find_answer(row: Row, key: str) -> tuple[Any, str]:
    """The answer and its column; verl keeps it in `reward_model.ground_truth`."""
    present, answer = find(row, key)
    if present:
        return answer, key
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return reward_model["ground_truth"], "reward_model.ground_truth"
    raise _fault(key, f"missing; the row has {', '.join(map(repr, row))}", "missing")


def _checked_answer(answer: Any, column: str) -> Any:
    """Numbers as text (7 and 7.0 are "7": tables with gaps turn whole numbers into floats); text, lists, dicts stay."""
    if answer is None or (isinstance(answer, float) and math.isnan(answer)):
        raise _fault(column, "null answer")
    if isinstance(answer, bool):
        raise _fault(
            column, f"the answer is {answer}; write it as the text that the reward compares with", "a boolean answer"
        )
    if isinstance(answer, float):
        if math.isinf(answer):
            raise _fault(column, f"the answer is {answer}, not a finite number", "not a finite number")
        return str(int(answer)) if answer.is_integer() else repr(answer)
    if isinstance(answer, int):
        return str(answer)
    if isinstance(answer, str):
        _check_text(answer, column)
        answer_is_empty = not answer.strip()
    else:
        answer_is_empty = not answer
    if answer_is_empty:
        raise _fault(column, "empty answer")
    if isinstance(answer, list) and any(
        item is None or (isinstance(item, str) and not item.strip()) for item in answer
    ):
        raise _fault(column, "the list of answers holds a null or empty answer")
    return answer


def _check_text(text: str, column: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _fault(column, f"half a character (lone surrogate) at place {error.start}", "half a character") from error
