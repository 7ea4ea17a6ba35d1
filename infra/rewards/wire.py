"""What crosses the border between the pool and its processes: JSON, never pickle.

A sample is plain data from a file, so every type that data files give comes out as the type that went in. A result is
read with suspicion: it comes from a process in which the user's code, and a model's answers, have run.
"""

import json
import math
import struct
from base64 import b64decode, b64encode
from dataclasses import fields
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from moonshift.core.errors import RewardError
from moonshift.core.rewards.graded import Graded
from moonshift.core.types import Prompt, Sample

HEADER = struct.Struct(">I")
"""length of what follows, bytes"""
LARGEST_RESULT = 64 * 2**20
"""bytes; a process that sends more is ended"""
_LONGEST_ERROR = 4000
_TAG = "~"
_AS_TEXT = (datetime, date, time)
"""most special first: a datetime is a date too"""


class Distrust(ValueError):
    """A process sent what no process of ours sends."""


def frame(message: dict[str, Any]) -> bytes:
    """A message with its length in front."""
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


def packed_sample(sample: Sample) -> dict[str, Any]:
    """A sample as JSON values; raises RewardError naming the column that holds something else."""
    prompt = {
        each.name: _packed(getattr(sample.prompt, each.name), f"{sample.prompt.uid}: {each.name}")
        for each in fields(Prompt)
    }
    own = [each.name for each in fields(Sample) if each.name != "prompt"]
    return {"prompt": prompt} | {name: _packed(getattr(sample, name), name) for name in own}


def unpacked_sample(packed: dict[str, Any]) -> Sample:
    """The sample that `packed_sample` was given."""
    own = {name: _unpacked(value) for name, value in packed.items() if name != "prompt"}
    prompt = Prompt(**{name: _unpacked(value) for name, value in packed["prompt"].items()})
    return Sample(prompt=prompt, **own)


def packed_graded(graded: Graded) -> list[Any]:
    """A result as JSON values; a long reason keeps its beginning and its end."""
    error = graded.error
    if error is not None and len(error) > _LONGEST_ERROR:
        error = f"{error[: _LONGEST_ERROR // 2]} … {error[-_LONGEST_ERROR // 2 :]}"
    return [graded.components, error]


def unpacked_graded(packed: Any, count: int) -> list[Graded]:
    """The results of one call. Raises Distrust unless there are `count`, of finite numbers by name or a text each."""
    if not isinstance(packed, list) or len(packed) != count:
        raise Distrust(f"its process sent no list of {count} results")
    return [_graded(each) for each in packed]


def _graded(packed: Any) -> Graded:
    match packed:
        case [dict() as components, None] if "score" in components:
            numbers = {name: _number(name, value) for name, value in components.items()}
            return Graded(components=numbers, error=None)
        case [None, str() as error]:
            return Graded(components=None, error=error)
    raise Distrust("its process sent something that is no result")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Distrust(f"its process sent {value!r:.60} for {name!r}")
    return float(value)


def _packed(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_packed(each, where) for each in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and key != _TAG for key in value):
            return {key: _packed(each, f"{where} {key}") for key, each in value.items()}
        return _tagged("map", [[_packed(key, where), _packed(each, where)] for key, each in value.items()])
    return _rarer(value, where)


def _rarer(value: Any, where: str) -> Any:
    if isinstance(value, tuple):
        return _tagged("tuple", [_packed(each, where) for each in value])
    if isinstance(value, bytes):
        return _tagged("bytes", b64encode(value).decode())
    if isinstance(value, Decimal):
        return _tagged("Decimal", str(value))
    if isinstance(value, timedelta):
        return _tagged("timedelta", [value.days, value.seconds, value.microseconds])
    for kind in _AS_TEXT:
        if isinstance(value, kind):
            return _tagged(kind.__name__, value.isoformat())
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufU":
        return _tagged("numpy", [value.tolist(), value.dtype.str, isinstance(value, np.generic)])
    raise RewardError(
        f"{where} holds a {type(value).__name__}, which cannot be handed to a reward process. Rewards get text, "
        "numbers, bytes, dates, lists, tuples, dicts and NumPy arrays; store the value as one of these."
    )


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {_TAG: kind, "value": value}


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _unpacked(each) for key, each in value.items()}
    return _untagged(value[_TAG], value["value"])


def _untagged(kind: str, value: Any) -> Any:
    match kind:
        case "map":
            return {_unpacked(key): _unpacked(each) for key, each in value}
        case "tuple":
            return tuple(_unpacked(each) for each in value)
        case "bytes":
            return b64decode(value)
        case "Decimal":
            return Decimal(value)
        case "timedelta":
            return timedelta(*value)
        case "numpy":
            plain, dtype, is_scalar = value
            array = np.array(plain, dtype=np.dtype(dtype))
            return array[()] if is_scalar else array
    return next(each for each in _AS_TEXT if each.__name__ == kind).fromisoformat(value)
