"""What every algorithm asks of its arguments, so that a wrong one is named at the border and not found as NaN later.

`B` is the number of sequences, `T` the padded response width in tokens.
"""

import math
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import ConfigError, NonFiniteError

Entry = TypeVar("Entry")


class NonFiniteInputError(NonFiniteError, ValueError):
    """A tensor handed to an algorithm is NaN or infinite where it counts."""


def lookup(argument: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """Return `table[name]`.

    Raises:
        ConfigError: `name` is unknown; the message names `argument` and every name that is allowed.
    """
    if name not in table:
        raise ConfigError(f"{argument} is {name!r}; it must be one of {', '.join(sorted(table))}.")
    return table[name]


def check_number(argument: str, value: float, *, at_least: float = 0.0, more_than: float | None = None) -> None:
    """Refuse a number that is not a finite Python number within its bound.

    Raises:
        ConfigError: naming `argument`, the value and the bound.
    """
    bound = f">= {at_least:g}" if more_than is None else f"> {more_than:g}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (value < at_least if more_than is None else value <= more_than):
        raise ConfigError(f"{argument} is {value!r}; it must be a finite number {bound}.")


def check_shapes(mask: Tensor, *, mask_name: str = "response_mask", **values: Tensor) -> None:
    """Refuse a mask that is not bool `[B, T]`, and values that are not float32 or float64 of the same shape and device.

    Raises:
        ValueError: naming the argument, what it is and what it must be.
    """
    if mask.dim() != 2 or mask.dtype != torch.bool:
        raise ValueError(f"{mask_name} is {_described(mask)}; it must be [B, T] torch.bool.")
    for name, value in values.items():
        wrong_dtype = value.dtype not in (torch.float32, torch.float64)
        if wrong_dtype or value.shape != mask.shape or value.device != mask.device:
            raise ValueError(
                f"{name} is {_described(value)}; it must be [B, T] = {list(mask.shape)} torch.float32 or torch.float64 "
                f"on {mask.device}, like {mask_name}."
            )


def check_rows(num_rows: int, dtype: torch.dtype, **values: Tensor) -> None:
    """Refuse values that are not `[B]` of the given type.

    Raises:
        ValueError: naming the argument, what it is and what it must be.
    """
    for name, value in values.items():
        if value.shape != (num_rows,) or value.dtype != dtype:
            raise ValueError(f"{name} is {_described(value)}; it must be [B] = [{num_rows}] {dtype}.")


def check_finite(where: Tensor, **values: Tensor) -> None:
    """Refuse values that are NaN or infinite where `where` `[B, T]` is true; what lies outside is never read.

    Raises:
        NonFiniteInputError: naming the argument, how many values are bad, and row, token and value of the first.
    """
    if not values:
        return
    bad = {name: where & ~torch.isfinite(value) for name, value in values.items()}
    if not bool(torch.stack([found.any() for found in bad.values()]).any()):  # one wait for the device, not one each
        return
    name, found = next((name, found) for name, found in bad.items() if bool(found.any()))
    row, token = (int(index) for index in found.nonzero()[0])
    raise NonFiniteInputError(
        f"{name} {list(found.shape)} has {int(found.sum())} non-finite value(s) that count; the first is row {row}, "
        f"token {token}: {float(values[name][row, token])}. Every value must be finite there; leave the sample out "
        "or skip the step."
    )


def check_tokens(mask: Tensor, *, mask_name: str = "response_mask", **values: Tensor) -> None:
    """`check_shapes`, then `check_finite` inside the mask; raises what they raise."""
    check_shapes(mask, mask_name=mask_name, **values)
    check_finite(mask, **values)


def _described(value: Tensor) -> str:
    return f"{list(value.shape)} {value.dtype} on {value.device}"
