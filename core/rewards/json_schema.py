"""The reward of structured output: JSON that fits a schema.

Invariant: the schema is read from the config or the data alone; nothing is fetched to resolve it.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..errors import RewardError
from ..types import Sample

FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)
MAX_LENGTH = 1_000_000


def json_schema_reward(
    sample: Sample, *, schema: Mapping[str, Any] | None = None, column: str | None = None
) -> dict[str, float]:
    """score: 1 where the response's JSON fits the schema; parsed: 1 where it is JSON at all.

    The JSON is the last fenced block, else the whole response. `schema`: the same for all samples; without it the
    prompt's own, in the column `column`, else in the answer (a mapping or its JSON text). Raises RewardError: no
    schema, or one that is none.
    """
    validator = _validator(json.dumps(dict(schema) if schema is not None else _own_schema(sample, column)))
    try:
        value = _parsed(sample.response)
    except (ValueError, RecursionError):
        return {"score": 0.0, "parsed": 0.0}
    from referencing.exceptions import Unresolvable

    try:
        return {"score": float(validator.is_valid(value)), "parsed": 1.0}
    except Unresolvable as error:
        raise RewardError(
            f"The schema points to {error.ref}, which is not fetched; put that schema under $defs."
        ) from error
    except RecursionError:  # nested deeper than any schema means
        return {"score": 0.0, "parsed": 1.0}


def _parsed(response: str) -> Any:
    """Strict JSON: no NaN, no name twice. Raises ValueError."""
    blocks = FENCE.findall(response[-MAX_LENGTH:])
    return json.loads(
        blocks[-1] if blocks else response.strip(), parse_constant=_refuse, object_pairs_hook=_without_repetition
    )


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _own_schema(sample: Sample, column: str | None) -> Any:
    prompt = sample.prompt
    if column is not None and column not in prompt.extra:
        columns = ", ".join(map(repr, prompt.extra)) or "none"
        raise RewardError(f"{prompt.uid}: has no column {column!r} (reward.kwargs.column). Columns: {columns}.")
    own = prompt.answer if column is None else prompt.extra[column]
    if isinstance(own, str):
        try:
            own = json.loads(own)
        except ValueError as error:
            raise RewardError(f"{prompt.uid}: the schema is no JSON: {error}. Give reward.kwargs.schema.") from error
    return own


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    loaded = json.loads(schema)
    if not isinstance(loaded, dict | bool):
        raise RewardError(f"The schema is a {type(loaded).__name__}; write a mapping.")
    kind: Any = validator_for(loaded)
    try:
        kind.check_schema(loaded)
    except SchemaError as error:
        raise RewardError(f"The schema is no JSON schema: {error.json_path}: {error.message}.") from error
    return kind(loaded, registry=REGISTRY)  # only the standard's own documents: no reference leaves this machine
