"""What a reward may return: one finite number, or a mapping of numbers with `score`.

Invariant: what is no finite number becomes a RewardContractError with value and type, never 0 and never a neighbour's.
"""

import math
import reprlib
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from ..errors import RewardContractError

SHOWN = reprlib.Repr()
SHOWN.maxstring = SHOWN.maxother = 120


def finite(value: Any) -> float | None:
    """`value` as a float where it is one finite number, else None.

    Numbers are bool, int, float, Decimal, Fraction, and scalars of NumPy and torch (0-d arrays and tensors too); text
    and arrays of one element are none.
    """
    plain = value
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and getattr(value, "shape", None) == ():
        plain = value.item()
    if not isinstance(plain, bool | int | float | Decimal | Fraction):
        return None
    try:
        number = float(plain)
    except (OverflowError, ValueError):  # too large for a float; a signalling NaN
        return None
    return number if math.isfinite(number) else None


def components(result: Any, what: str, *, skip_text: bool = False) -> dict[str, float]:
    """The components of one result, `score` among them; a plain number is `{"score": number}`.

    `what`: names function and sample in messages. `skip_text`: texts beside the score are left out, as verl does.
    Raises RewardContractError: anything that is no finite number, or a mapping without `score`.
    """
    if not isinstance(result, Mapping):
        return {"score": _number(result, what)}
    if "score" not in result:
        raise RewardContractError(
            f"{what} returned {SHOWN.repr(dict(result))} without 'score'. "
            f"Put the number to train on under the key 'score'."
        )
    kept = {key: value for key, value in result.items() if not (skip_text and key != "score" and _is_text(value))}
    return {str(key): _number(value, what, str(key)) for key, value in kept.items()}


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str | bytes)


def _number(value: Any, what: str, component: str | None = None) -> float:
    number = finite(value)
    if number is None:
        place = "" if component is None else f" under {component!r}"
        raise RewardContractError(
            f"{what} returned {SHOWN.repr(value)} ({type(value).__name__}){place}; "
            f"return one finite number, or a dict of numbers with the key 'score'."
        )
    return number
