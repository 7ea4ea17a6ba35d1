r"""Refuses formulas whose evaluation could take for ever or fill the memory, before any algebra system sees them.

Invariant: decided from the text alone, in time linear in its length.
"""

import math
import re

MAX_LENGTH = 400
MAX_DEPTH = 20
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 5000
MAX_SYMBOLIC_EXPONENT = 12
"""Of a bracket with variables: it may be multiplied out."""
REFUSED = re.compile(
    r"\\(?:sum|prod|int|iint|oint|lim|Gamma|zeta|uparrow)(?![A-Za-z])|!\s*!|\\exp.*\\exp|\^\{\d+\}\s*\^|\u2191"
)
SMALL_TOWER = re.compile(r"\s*([1-9])\s*\^\s*(?:\{([1-9])\}|([1-9]))\s*", re.ASCII)
VARIABLE_POWER = re.compile(r"(?<![A-Za-z\\])[A-Za-z]\^(?:\{[1-9]\}|[1-9](?!\d))", re.ASCII)
"""In an exponent, `x^2` is no larger than `x`: nothing is multiplied out."""
NUMBERS = re.compile(r"\d+")


def too_expensive(text: str) -> str | None:
    r"""Why a normalized formula is not evaluated, or None. Example: `10^{10^{10}}` has a power in an exponent."""
    if len(text) > MAX_LENGTH:
        return f"longer than {MAX_LENGTH} characters"
    if _depth(text) > MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH}"
    found = REFUSED.search(text)
    if found:
        return f"{found[0]!r} is not evaluated"
    return _powers(text) or _factorials(text) or _binomials(text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest


def _powers(text: str) -> str | None:
    has_letters = re.search(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", text) is not None
    sizes: list[int] = []
    of_bracket = False
    for place in (match.end() for match in re.finditer(r"\^|\*\*", text)):
        exponent = VARIABLE_POWER.sub("x", _argument(text, place))
        tower = SMALL_TOWER.fullmatch(exponent)
        if tower is None and re.search(r"\^|\*\*|!|\\binom", exponent):
            return "a power or factorial in an exponent"
        sizes.append(int(tower[1]) ** int(tower[2] or tower[3]) if tower else _product(exponent))
        after_bracket = text[:place].rstrip("^* ").endswith((")", "}", "]"))
        of_bracket = of_bracket or (after_bracket and sizes[-1] > 1)
        if after_bracket and has_letters and sizes[-1] > MAX_SYMBOLIC_EXPONENT:
            return f"a bracket with variables to a power over {MAX_SYMBOLIC_EXPONENT}"
    # a bracket may hold the other powers, and exponents multiply then
    size = math.prod(sizes) if of_bracket else max(sizes, default=0)
    return f"an exponent over {MAX_EXPONENT}" if size > MAX_EXPONENT else None


def _factorials(text: str) -> str | None:
    for match in re.finditer(r"!", text):
        before = text[: match.start()].rstrip()
        number = re.search(r"\d+$", before)
        if number and _value(number[0]) > MAX_FACTORIAL:
            return f"a factorial over {MAX_FACTORIAL}"
        if before.endswith((")", "}", "]")) and re.search(r"\d{3,}|!|\^", _bracket_before(before)):
            return "a factorial of a formula"
    return None


def _binomials(text: str) -> str | None:
    for match in re.finditer(r"\\binom", text):
        upper = _argument(text, match.end())
        if re.search(r"\^|!", upper) or _product(upper) > MAX_FACTORIAL:
            return f"a binomial coefficient over {MAX_FACTORIAL}"
    return None


def _argument(text: str, place: int) -> str:
    """The braces, bracket, number or single character at `place`."""
    while place < len(text) and text[place] == " ":
        place += 1
    if text[place : place + 1] not in ("{", "("):
        number = re.compile(r"[-+]?\d+").match(text, place)
        return number[0] if number else text[place : place + 1]
    depth = 0
    for end in range(place, len(text)):
        depth += (text[end] in "{(") - (text[end] in "})")
        if depth == 0:
            return text[place + 1 : end]
    return text[place + 1 :]


def _bracket_before(text: str) -> str:
    depth = 0
    for place in range(len(text) - 1, -1, -1):
        depth += (text[place] in "})]") - (text[place] in "{([")
        if depth == 0:
            return text[place:]
    return text


def _product(text: str) -> int:
    """Bound of what whole numbers in an exponent can come to: their product."""
    product = 1
    for digits in NUMBERS.findall(text):
        product *= max(1, _value(digits))
        if product > MAX_EXPONENT**2:
            break
    return product


def _value(digits: str) -> int:
    return int(digits[:12])
