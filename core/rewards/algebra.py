r"""Compares two formulas that math-verify reads: by their values, and by its own rules where they have none.

Invariant: nothing here uses signals, so it works in every thread; what hangs is the caller's to kill, and what is known
to be expensive never gets here (`expense`).
"""

import logging
import re
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from .quantities import Quantity, stands_for

PRECISION = 60
"""Decimal digits of a comparison of numbers."""
EQUAL = 40
"""Digits in which two exact numbers must agree."""
POINTS = (
    (Fraction(7, 11), Fraction(13, 29)),
    (Fraction(-19, 7), Fraction(23, 31)),
    (Fraction(-5, 13), Fraction(-17, 19)),
)
"""First value and stride of the variables at which formulas must agree: negative too, where |x| is not x."""
FAULTS = (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError, RecursionError, KeyError)
"""What SymPy raises on formulas that it cannot handle."""


def same_formula(answer: str, right: str) -> bool:
    """Whether two normalized formulas are equal; False where one cannot be read."""
    left, reference = _read(answer), _read(right)
    if left is None or reference is None:
        return False
    if _is_number(left) and _is_number(reference):
        return _same_number(left, reference)
    agree = _agree_at_points(left, reference)
    if agree is not None:
        return agree
    from math_verify import verify

    return verify(reference, left, timeout_seconds=None, allow_set_relation_comp=True)


def decimal_stands_for(decimal: Quantity, formula: str) -> bool:
    """Whether a decimal is the value of a formula without variables, to all digits that it shows."""
    read = _read(formula)
    if read is None or not _is_number(read):
        return False
    value = _value(read)
    if value is None or not value.is_real:
        return False
    from sympy import Rational

    shown = Rational(decimal.value.numerator, decimal.value.denominator) / (100 if decimal.percent else 1)
    error = (value - shown).evalf(PRECISION)
    if abs(error) <= abs(value) * Rational(1, 10**EQUAL):
        return True
    return not decimal.percent and stands_for(decimal, Fraction(str(error)))


@cache
def _library() -> Any:
    """math-verify's reader; it warns once that it has no time-out, which is what we want."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from math_verify import LatexExtractionConfig, parse

    config = [LatexExtractionConfig(boxed_match_priority=-1)]
    return lambda text: parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=0)


@lru_cache(maxsize=256)
def _read(text: str) -> Any:
    """The formula as SymPy has it, decimals as exact fractions, `i` as the imaginary unit; None: not readable."""
    from sympy import Basic, Float, I, MatrixBase, Rational, Symbol

    if "$" in text:
        return None
    found = _library()(text)
    if not found or not isinstance(found[0], Basic | MatrixBase):
        return None
    formula: Any = found[0]
    try:
        exact = {each: Rational(str(each)) for each in formula.atoms(Float) if each.is_finite}
        if re.search(r"(?<![A-Za-z\\])i(?![A-Za-z])", text):
            exact |= {each: I for each in formula.atoms(Symbol) if each.name == "i"}
        return formula.xreplace(exact) if exact else formula
    except FAULTS:
        return formula


def _is_number(formula: Any) -> bool:
    from sympy import Expr

    return isinstance(formula, Expr) and not formula.free_symbols and formula.is_finite is not False


def _value(formula: Any) -> Any:
    """A number to `PRECISION` digits, or None."""
    try:
        value = formula.doit().evalf(PRECISION)
    except FAULTS:
        return None
    return value if value.is_number and not value.has("nan") and value.is_finite is not False else None


def _same_number(left: Any, right: Any) -> bool:
    """Relative to their size: 1/2004! is not 1/2006!."""
    if left == right:
        return True
    first, second = _value(left), _value(right)
    if first is None or second is None:
        return False
    return _near(first, second)


def _near(first: Any, second: Any) -> bool:
    from sympy import Rational

    try:
        size = max(abs(first), abs(second))
        return bool(size == 0 or abs(first - second) <= size * Rational(1, 10**EQUAL))
    except FAULTS:
        return False


def _agree_at_points(left: Any, right: Any) -> bool | None:
    """Whether two formulas have the same values at `POINTS`; None where one of them has no number there.

    Two formulas that differ agree at a point only by chance; and unlike simplification this always ends soon.
    """
    from sympy import Expr, Rational

    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        return None
    names = sorted(left.free_symbols | right.free_symbols, key=str)
    for first, stride in POINTS:
        places = [first + place * stride for place in range(len(names))]
        point: Any = {name: Rational(at.numerator, at.denominator) for name, at in zip(names, places, strict=True)}
        try:
            values = [_value(each.subs(point)) for each in (left, right)]
        except FAULTS:
            return None
        if None in values:
            return None
        if not _near(*values):
            return False
    return True
