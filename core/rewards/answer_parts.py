r"""Takes an answer of several parts apart: lists, sets, tuples, intervals, unions, matrices, ratios, `\pm`.

Invariant: only separators outside of all brackets cut, and each text has one reading.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .latex_text import compact

OPENING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\langle": r"\rangle"}
TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[clr| ]*\})?(.*)\\end\{\1\}", re.DOTALL)
WORD = re.compile(r"\s*\\text\{\s*(?:,?\s*and|,?\s*or)\s*\}\s*|,?\s+(?:and|or)\s+")
RELATIONS = (r"\leq", r"\geq", r"\neq", "<", ">")
THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
NAME = re.compile(
    r"(?:\\text\{[^{}]*\}|\\?[A-Za-z]+'*|[A-Za-z](?: ?[A-Za-z])*)"
    r"(?:_(?:\{[^{}]*\}|\w))?(?:\^\{-1\})?(?:\([A-Za-z](?:,[A-Za-z])*\))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    r"""Example: `[1,2)` has kind "[)" and items ("1", "2"); `1, 2` has kind "list"."""

    kind: str
    r"""list | union | matrix | ratio | the two brackets: (), [], [), (], {}, <>"""
    items: tuple[str, ...]
    shape: tuple[int, int] = (0, 0)
    """rows and columns of a matrix; its items stand row by row"""

    @property
    def ordered(self) -> bool:
        """Whether the places of the items matter."""
        return self.kind not in ("list", "union", "{}")


def parts_of(text: str) -> Parts | None:
    """What a normalized text is made of; None: it is one thing."""
    text = text.strip()
    union = split(text, (r"\cup",))
    if len(union) > 1:
        return Parts(kind="union", items=tuple(union))
    matrix = _matrix(text)
    if matrix is not None:
        return matrix
    found = _enclosed(text)
    if found is not None:
        return found
    items = listed(text)
    if len(items) > 1:
        return Parts(kind="list", items=items)
    ratio = split(text, (":",))
    if len(ratio) > 1:
        return Parts(kind="ratio", items=tuple(ratio))
    return None


def listed(text: str) -> tuple[str, ...]:
    """The parts between commas, semicolons, "and" and "or"; a comma before three digits may be inside a number."""
    found: list[str] = []
    for piece in _by_words(text):
        spaced = split(piece, (", ", ";"))
        numbers = len(spaced) > 1 and all("," not in each or THOUSANDS.fullmatch(each.strip("$- ")) for each in spaced)
        found.extend(spaced if numbers else split(piece, (",", ";")))
    return tuple(each.strip() for each in found if each.strip())


def split(text: str, separators: tuple[str, ...]) -> list[str]:
    """`text` cut at separators that stand outside of all brackets."""
    pieces, begin, depth, place = [], 0, 0, 0
    while place < len(text):
        token = TOKEN.match(text, place)
        assert token is not None
        found = next((each for each in separators if text.startswith(each, place)), None)
        if depth == 0 and found and not (found[0] == "\\" and text[place + len(found) :][:1].isalpha()):
            pieces.append(text[begin:place].strip())
            place = begin = place + len(found)
            continue
        depth += (token[0] in OPENING) - (token[0] in OPENING.values())
        place = token.end()
    pieces.append(text[begin:].strip())
    return pieces


def without_name(text: str) -> tuple[str, str]:
    r"""The name that an answer begins with and the rest: `x=5` is ("x", "5"), `x \in A` is ("x", "A").

    Of a chain `x = 2+3 = 5` the rest is the last part. Without a name: ("", text).
    """
    pieces = split(text, (r"\approx", "="))
    if len(pieces) > 1 and not _relation(text) and NAME.fullmatch(pieces[0]) and all(pieces):
        if any(len(listed(each)) > 1 for each in pieces[1:-1]):
            return "", text  # a list of equations
        return compact(pieces[0]), pieces[-1]
    inside = split(text, (r"\in",))
    if len(inside) == 2 and NAME.fullmatch(inside[0]):
        return compact(inside[0]), inside[1]
    return "", text


def both_signs(text: str) -> tuple[str, str] | None:
    r"""`1 \pm 2` as (`1 + 2`, `1 - 2`); `\pm 2` as (`2`, `-2`); None without exactly one `\pm`."""
    if text.count(r"\pm") + text.count(r"\mp") != 1 or _enclosed(text) is not None:
        return None
    place = max(text.find(r"\pm"), text.find(r"\mp"))
    before, after = text[:place].strip(), text[place + 3 :].strip()
    return (f"{before}+{after}" if before else after), f"{before}-{after}"


def is_relation(text: str) -> bool:
    """Whether an inequality or an equation stands outside of all brackets."""
    return _relation(text) or len(split(text, ("=",))) > 1


def _relation(text: str) -> bool:
    return len(split(text, RELATIONS)) > 1


def _by_words(text: str) -> Iterator[str]:
    begin = 0
    for match in WORD.finditer(text):
        before = text[: match.start()]
        if before.count("{") - before.count("}") == 0 and before.count("(") == before.count(")"):
            yield text[begin : match.start()]
            begin = match.end()
    yield text[begin:]


def _matrix(text: str) -> Parts | None:
    match = MATRIX.fullmatch(text)
    if match is None or r"\begin" in match[2]:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\", match[2].strip().removesuffix(r"\\"))]
    if len({len(row) for row in rows}) != 1:
        return None
    items = tuple(item.strip() for row in rows for item in row)
    return Parts(kind="matrix", items=items, shape=(len(rows), len(rows[0])))


def _enclosed(text: str) -> Parts | None:
    """What one pair of brackets holds, from the first character to the last."""
    opening = next((each for each in (r"\langle", r"\{", "(", "[") if text.startswith(each)), None)
    end = next((each for each in (r"\rangle", r"\}", ")", "]") if text.endswith(each)), None)
    if opening is None or end is None or not _one_pair(text, len(end)):
        return None
    inside = text[len(opening) : len(text) - len(end)]
    if {opening, end} & {r"\{", r"\}", r"\langle", r"\rangle"} and OPENING[opening] != end:
        return None
    kind = {r"\{": "{}", r"\langle": "<>"}.get(opening, opening + end)
    if kind == "{}" and len(split(inside, (r"\mid", "|", ":"))) > 1:
        return None  # a set by its property
    items = tuple(each.strip() for each in split(inside, (",", ";")))
    if kind == "{}":
        items = listed(inside)
    elif THOUSANDS.fullmatch(inside) and ",0" in inside:
        items = (inside,)
    if kind != "{}" and len(items) == 1 and kind != "()":
        return None
    return Parts(kind=kind, items=tuple(each for each in items if each)) if inside.strip() else None


def _one_pair(text: str, end: int) -> bool:
    depth, place = 0, 0
    while place < len(text):
        token = TOKEN.match(text, place)
        assert token is not None
        depth += (token[0] in OPENING) - (token[0] in OPENING.values())
        place = token.end()
        if depth == 0:
            return place >= len(text)
    return False
