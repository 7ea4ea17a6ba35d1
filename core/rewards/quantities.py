r"""Plain numbers as answers are written, exactly: `1{,}000`, `-\frac{2}{3}`, `1.5\times 10^{3}`, `50\%`, `5\text{ cm}`.

Invariant: a value is a Fraction and never rounded; a decimal knows how many digits it was written with.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from .latex_text import compact

MAX_EXPONENT = 5000
"""Of ten; a number of more digits is not read here."""
MIN_DIGITS = 6
"""Significant digits that a decimal needs to stand for a value that it does not write out."""
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d+)"
DECIMAL = re.compile(rf"({DIGITS})?(?:\.(\d*)(?:\\overline\{{(\d+)\}})?)?", re.ASCII)
TEN = r"10\^(?:\{(?P<braced>[-+]?\d{1,9})\}|(?P<digit>\d))"
POWER_OF_TEN = re.compile(TEN, re.ASCII)
SCIENTIFIC = re.compile(rf"(?P<front>.+?)(?:(?:\\times|\\cdot|\*|x){TEN}|[eE](?P<after_e>[-+]?\d{{1,9}}))", re.ASCII)
FRACTION = re.compile(r"(.*?)\\frac\{([^{}]*)\}\{([^{}]*)\}", re.DOTALL)
SLASHED = re.compile(r"(?:(\d+) )?([^/ ]+)/([^/ ]+)")
TEXT_UNIT = re.compile(r"\s*\\text\{([^{}]*)\}(?:\^(?:\{(\d)\}|(\d)))?$")
WORD_UNIT = re.compile(r"(?<=[\d}.]) ?([A-Za-z]{2,}(?: [A-Za-z]+)*|[€£¥$])(?:\^(?:\{(\d)\}|(\d)))?$", re.ASCII)
SAME_UNIT = {
    "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre", "mm": "millimeter millimetre",
    "kg": "kilogram", "g": "gram", "mg": "milligram", "s": "sec second", "min": "minute", "h": "hr hour", "day": "",
    "week": "", "month": "", "year": "yr", "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "mph": "", "lb": "pound", "oz": "ounce", "l": "liter litre", "ml": "milliliter millilitre", "dollar": "$ usd",
    "cent": "¢", "euro": "€ eur", "degree": "deg", "unit": "", "km/h": "kmh kph", "m/s": "", "percent": "%",
    "rad": "radian", "hz": "hertz", "n": "newton", "j": "joule", "w": "watt", "v": "volt",
    "gbp": "£", "yen": "¥", "person": "people", "point": "", "time": "", "way": "", "student": "",
}  # fmt: skip
UNITS = {word: unit for unit, words in SAME_UNIT.items() for word in (unit, *words.split())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number with its unit. Example: `12.50 \\text{ cm}` is 25/2, last_place 1/100, digits 4, unit cm."""

    value: Fraction
    """before the percent sign is counted"""
    last_place: Fraction | None = None
    """value of the last digit of a decimal; None: written exactly"""
    digits: int = 0
    """significant digits of a decimal"""
    percent: bool = False
    unit: str = ""


def quantity(text: str) -> Quantity | None:
    """The number that a normalized text is, or None."""
    if len(text) > 400:
        return None
    bare, unit = _without_unit(text)
    percent = unit == "percent"
    negative = False
    bare = bare.strip()
    while bare[:1] in ("+", "-", "$", "€", "£", "¥"):
        if bare[0] in "+-":
            if bare[1:2] in ("+", "-"):
                return None
            negative ^= bare[0] == "-"
        else:
            unit = unit or UNITS[bare[0]]
        bare = bare[1:].lstrip()
    number = _magnitude(bare)
    if number is None:
        return None
    value = -number.value if negative else number.value
    return Quantity(
        value=value,
        last_place=number.last_place,
        digits=number.digits,
        percent=percent,
        unit="" if percent else unit,
    )


def same_quantity(left: Quantity, right: Quantity) -> bool:
    """Same value, and units that do not contradict each other.

    A decimal stands for a value that it does not write out (1/3, π) from six significant digits on, rounded or cut off.
    A percentage equals its value and, beside a bare number, the number before its sign: 50 % is 0.5 and is 50.
    """
    if left.unit and right.unit and left.unit != right.unit:
        return False
    if left.percent == right.percent:
        return _close(left, right)
    return _close(left, right) or _close(_as_value(left), _as_value(right))


def stands_for(decimal: Quantity, error: Fraction) -> bool:
    """Whether a decimal may stand for a value that is `error` away."""
    return decimal.last_place is not None and decimal.digits >= MIN_DIGITS and abs(error) < decimal.last_place


def _as_value(each: Quantity) -> Quantity:
    if not each.percent:
        return each
    place = None if each.last_place is None else each.last_place / 100
    return Quantity(value=each.value / 100, last_place=place, digits=each.digits)


def _close(left: Quantity, right: Quantity) -> bool:
    error = left.value - right.value
    return error == 0 or stands_for(left, error) or stands_for(right, error)


def _without_unit(text: str) -> tuple[str, str]:
    bare = text.strip()
    if bare.endswith(("%", "percent", r"\text{percent}", r"\text{ percent}")):
        return re.sub(r"\s*(?:%|percent|\\text\{\s*percent\})$", "", bare), "percent"
    if re.search(r"\^\\circ\s*(?:\\text\{\s*)?[CF]?\}?$", bare):
        scale = bare.rstrip("}")[-1:]
        unit = f"degree {scale}" if scale in ("C", "F") else "degree"
        return re.sub(r"\^\\circ\s*(?:\\text\{\s*)?[CF]?\}?$", "", bare), unit
    for pattern in (TEXT_UNIT, WORD_UNIT):
        found = pattern.search(bare)
        if found is None:
            continue
        name = _unit_name(found[1])
        if pattern is WORD_UNIT and name.split(" ")[-1] not in SAME_UNIT and name not in SAME_UNIT:
            continue
        power = found[2] or found[3] or ""
        return bare[: found.start()], name + power
    return bare, ""


def _unit_name(written: str) -> str:
    """`Centimeters` as cm; `square feet` as ft2; an unknown word as it is, without its plural's s."""
    words = written.strip().rstrip(".").split()
    power = ""
    if len(words) > 1 and words[0].lower() in ("square", "cubic", "sq"):
        power = "3" if words[0].lower() == "cubic" else "2"
        words = words[1:]
    named = [UNITS.get(word) or UNITS.get(word.lower()) or _singular(word.lower()) for word in words]
    return " ".join(named) + power


def _singular(word: str) -> str:
    single = word[:-1] if len(word) > 3 and word.endswith("s") else word
    return UNITS.get(single, single)


def _magnitude(text: str) -> Quantity | None:
    """A number without sign and unit."""
    for read in (_decimal, _scientific, _fraction, _slashed):
        found = read(text)
        if found is not None:
            return found
    return None


def _decimal(text: str) -> Quantity | None:
    match = DECIMAL.fullmatch(text)
    if match is None or not (match[1] or match[2] or match[3]):
        return None
    whole = re.sub("[, ]", "", match[1] or "")
    decimals, repeated = match[2] or "", match[3] or ""
    value = Fraction(int(whole + decimals or "0"), 10 ** len(decimals))
    if repeated:
        value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(decimals))
        return Quantity(value=value)
    if not decimals:
        return Quantity(value=value)
    return Quantity(
        value=value, last_place=Fraction(1, 10 ** len(decimals)), digits=len((whole + decimals).lstrip("0"))
    )


def _scientific(text: str) -> Quantity | None:
    bare = compact(text).replace(" ", "")
    match = POWER_OF_TEN.fullmatch(bare) or SCIENTIFIC.fullmatch(bare)
    if match is None:
        return None
    exponent = int(next(match[name] for name in ("braced", "digit", "after_e") if match.groupdict().get(name)))
    front = _decimal(match.groupdict().get("front", "1"))
    if front is None or abs(exponent) > MAX_EXPONENT:
        return None
    factor = Fraction(10) ** exponent
    place = None if front.last_place is None else front.last_place * factor
    return Quantity(value=front.value * factor, last_place=place, digits=front.digits)


def _fraction(text: str) -> Quantity | None:
    match = FRACTION.fullmatch(text)
    if match is None:
        return None
    whole = _decimal(match[1].strip()) if match[1].strip() else Quantity(value=Fraction(0))
    mixed = bool(match[1].strip())
    return _divided(whole, match[2], match[3], mixed=mixed)


def _slashed(text: str) -> Quantity | None:
    match = SLASHED.fullmatch(text)
    if match is None:
        return None
    whole = Quantity(value=Fraction(int(match[1]))) if match[1] else Quantity(value=Fraction(0))
    return _divided(whole, match[2].strip("()"), match[3].strip("()"), mixed=bool(match[1]))


def _divided(whole: Quantity | None, above: str, below: str, *, mixed: bool) -> Quantity | None:
    """whole + above / below; the part of a mixed number is a proper fraction without signs."""
    parts = []
    for written in (above, below):
        bare = written.strip()
        sign = -1 if bare.startswith("-") else 1
        number = _decimal(bare.lstrip("-").strip()) if bare.count("-") <= 1 else None
        if number is None or (mixed and (sign < 0 or number.last_place is not None)):
            return None
        parts.append(sign * number.value)
    if whole is None or parts[1] == 0 or (mixed and (whole.last_place is not None or parts[0] >= parts[1])):
        return None
    return Quantity(value=whole.value + parts[0] / parts[1])
