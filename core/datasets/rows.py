"""One raw row to a checked Prompt, or to the reason why not.

Invariant: a Prompt has a non-empty last user turn and a right answer; nothing of a row is dropped, all columns but
prompt and answer go into `extra`.
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
    """Where prompt and answer are, and what is put before each prompt."""

    prompt_key: str
    answer_key: str
    system_prompt: str | None


class RowFaultError(DataError):
    """One row cannot be used; the message is `column NAME: reason`."""


def to_prompt(row: Row, columns: Columns, *, uid: str, source: str) -> Prompt:
    """The checked Prompt of a row. Raises RowFaultError with column and reason."""
    messages = _messages(row, columns)
    answer, answer_column = _find_answer(row, columns.answer_key)
    data_source = row.get("data_source")
    return Prompt(
        uid=uid,
        messages=messages,
        text=[turn["content"] for turn in messages if turn["role"] == "user"][-1],
        answer=_checked_answer(answer, answer_column),
        source=data_source if isinstance(data_source, str) and data_source else source,
        extra={key: value for key, value in row.items() if key not in (columns.prompt_key, columns.answer_key)},
        answer_column=answer_column.rpartition(".")[2],
        chat=isinstance(row[columns.prompt_key], list),
    )


def _fault(column: str, reason: str) -> RowFaultError:
    return RowFaultError(f"column {column}: {reason}")


def _messages(row: Row, columns: Columns) -> Turns:
    key = columns.prompt_key
    if key not in row:
        raise _fault(key, f"missing; the row has {', '.join(map(repr, row)) or 'no columns'}")
    value = row[key]
    if value is None:
        raise _fault(key, "null prompt")
    if isinstance(value, str):
        turns = ({"role": "user", "content": value},)
    elif isinstance(value, list):
        turns = tuple(_turn(turn, place, key) for place, turn in enumerate(value))
    else:
        raise _fault(key, f"{type(value).__name__} {value!r:.60}; a prompt is text or a list of turns")
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
        raise _fault(key, f"turn {place} is a {type(turn).__name__}, not {{role, content}}")
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or not role:
        raise _fault(key, f"turn {place} has no role")
    if not isinstance(content, str):
        raise _fault(key, f"turn {place} ({role}) has {type(content).__name__} as content; only text is read")
    further = [name for name, value in turn.items() if name not in ("role", "content") and value is not None]
    if further:
        raise _fault(key, f"turn {place} ({role}) has {', '.join(further)}; only role and content are read")
    return {"role": role, "content": content}


def _find_answer(row: Row, key: str) -> tuple[Any, str]:
    """The answer and its column; verl keeps it in `reward_model.ground_truth`."""
    if key in row:
        return row[key], key
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return reward_model["ground_truth"], "reward_model.ground_truth"
    raise _fault(key, f"missing; the row has {', '.join(map(repr, row))}")


def _checked_answer(answer: Any, column: str) -> Any:
    """Numbers as text (7 and 7.0 are "7": tables with gaps turn whole numbers into floats); text, lists, dicts stay."""
    if answer is None or (isinstance(answer, float) and math.isnan(answer)):
        raise _fault(column, "null answer")
    if isinstance(answer, bool):
        raise _fault(column, f"the answer is {answer}; write it as the text that the reward compares with")
    if isinstance(answer, float):
        if math.isinf(answer):
            raise _fault(column, f"the answer is {answer}, not a finite number")
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
        raise _fault(column, f"half a character (lone surrogate) at place {error.start}") from error
