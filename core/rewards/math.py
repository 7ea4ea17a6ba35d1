r"""Grades the final answer of a response that does mathematics.

Invariant: a verdict is right or wrong with a reason and depends on the two answers alone; the same in every thread.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RewardError
from ..types import Sample
from .algebra import decimal_stands_for, same_formula
from .answer_parts import Parts, both_signs, is_relation, parts_of, without_name
from .expense import too_expensive
from .final_answer import Extraction, final_answer, without_box
from .latex_text import compact, normalized, unwrapped_text
from .quantities import Quantity, quantity, same_quantity

MAX_PARTS = 60
WORDS = re.compile(r"[A-Za-z][A-Za-z' .-]+")
OTHER_BASE = re.compile(r"\d_|\d\)_")
"""A number in another base is compared as a text."""
DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\\circ")
CHOICE = re.compile(r"\(?([A-Z])\)?\.?")


@dataclass(frozen=True, slots=True, kw_only=True)
class MathVerdict:
    """Whether a response's final answer is right, and why."""

    right: bool
    answer: str | None
    """the final answer as it was written; None: there is none"""
    reason: str


def math_reward(sample: Sample, *, extraction: Extraction = "flexible") -> dict[str, float]:
    r"""score: 1 where the response's final answer equals the prompt's; answered: 1 where it has a final answer.

    `extraction`: "boxed" looks for `\boxed{…}` only; "flexible" for other forms too where there is no box. A right
    answer that is a list holds alternatives. Raises RewardError on another extraction.
    """
    if extraction not in ("boxed", "flexible"):
        raise RewardError(f"reward.kwargs.extraction is {extraction!r}; use boxed or flexible.")
    verdict = grade_math(sample.response, sample.prompt.answer, extraction=extraction)
    return {"score": float(verdict.right), "answered": float(verdict.answer is not None)}


def grade_math(response: str, right_answer: Any, *, extraction: Extraction = "flexible") -> MathVerdict:
    r"""The verdict on a response. Example: `grade_math(r"so \boxed{\frac12}", "0.5").right` is True."""
    answer = final_answer(response, extraction)
    if answer is None:
        return MathVerdict(right=False, answer=None, reason="no final answer")
    alternatives = right_answer if isinstance(right_answer, list) else [right_answer]
    given = normalized(answer)
    reasons = []
    for each in alternatives:
        expected = normalized(without_box(str(each)))
        if same_answer(given, expected):
            return MathVerdict(right=True, answer=answer, reason=f"equals {expected}")
        refused = too_expensive(given) or too_expensive(expected)
        reasons.append(f"is not {expected}" + (f" as a text, and is not evaluated: {refused}" if refused else ""))
    return MathVerdict(right=False, answer=answer, reason="; ".join(reasons))


def same_answer(given: str, expected: str, depth: int = 0) -> bool:
    """Whether two normalized answers are the same: as texts, numbers, parts of a whole, or formulas."""
    if not given or not expected or depth > 6:
        return False
    if compact(given) == compact(expected):
        return True
    left, right = quantity(given), quantity(expected)
    if left is not None and right is not None and same_quantity(left, right):
        return True
    name, bare = without_name(given)
    other_name, other_bare = without_name(expected)
    if name or other_name:
        both = bool(name and other_name)
        if both and name != other_name:
            return False
        if both or not is_relation(other_bare if name else bare):
            return same_answer(bare, other_bare, depth + 1)
    signs = _expanded(given, expected)
    if signs is not None:
        return _same_items(*signs, ordered=False, depth=depth)
    parts, other_parts = parts_of(given), parts_of(expected)
    if parts is not None or other_parts is not None:
        return _same_parts((given, parts), (expected, other_parts), depth)
    if left is not None and right is not None:
        return False
    words = _same_words(given, expected)
    return _same_single(given, expected, left, right) if words is None else words


def _same_single(given: str, expected: str, left: Quantity | None, right: Quantity | None) -> bool:
    if too_expensive(given) or too_expensive(expected) or OTHER_BASE.search(given) or OTHER_BASE.search(expected):
        return False
    for decimal, formula in ((left, expected), (right, given)):
        if decimal is not None and decimal.last_place is not None:
            return decimal_stands_for(decimal, _plain(formula))
    return same_formula(_plain(given), _plain(expected))


def _plain(formula: str) -> str:
    """As the library reads it: no dollar sign, percent signs with their backslash, degrees in radians."""
    return DEGREES.sub(r"(\\frac{\1\\pi}{180})", formula.replace("$", "").replace("%", r"\%"))


def _expanded(given: str, expected: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    r"""Both as lists where one has a `\pm`."""
    if r"\pm" not in given + expected and r"\mp" not in given + expected:
        return None
    lists = []
    for text in (given, expected):
        signs = both_signs(text)
        parts = parts_of(text) if signs is None else None
        items = signs or (parts.items if parts is not None and not parts.ordered else (text,))
        lists.append(tuple(each for item in items for each in (both_signs(item) or (item,))))
    return lists[0], lists[1]


def _same_parts(given: tuple[str, Parts | None], expected: tuple[str, Parts | None], depth: int) -> bool:
    (text, parts), (other_text, other) = given, expected
    # one thing in round brackets or braces is that thing
    if parts is not None and len(parts.items) == 1 and parts.kind in ("()", "{}"):
        return same_answer(parts.items[0], other_text, depth + 1)
    if other is not None and len(other.items) == 1 and other.kind in ("()", "{}"):
        return same_answer(text, other.items[0], depth + 1)
    if parts is None or other is None:
        if is_relation(text) != is_relation(other_text) and not (too_expensive(text) or too_expensive(other_text)):
            return same_formula(text, other_text)  # 1 < x < 2 and (1, 2)
        return False
    kinds = {parts.kind, other.kind}
    unordered = not parts.ordered and not other.ordered
    if len(kinds) > 1 and not unordered and kinds != {"list", "()"}:
        return False
    if parts.shape != other.shape:
        return False
    items, other_items = _named_items(parts), _named_items(other)
    if parts.kind == "{}" or other.kind == "{}":
        items, other_items = _distinct(items, depth), _distinct(other_items, depth)
    return _same_items(items, other_items, ordered=not unordered, depth=depth)


def _named_items(parts: Parts) -> tuple[str, ...]:
    """`x=1, 2` as `x=1` and `x=2`; other items as they are."""
    name, first = without_name(parts.items[0])
    if parts.kind != "list" or not name or any(is_relation(each) for each in parts.items[1:]):
        return parts.items
    return tuple(f"{name}={each}" for each in (first, *parts.items[1:]))


def _same_items(items: Sequence[str], others: Sequence[str], *, ordered: bool, depth: int) -> bool:
    if len(items) != len(others) or len(items) > MAX_PARTS:
        return False
    if ordered:
        return all(same_answer(each, other, depth + 1) for each, other in zip(items, others, strict=True))
    left = list(others)
    for each in items:
        match = next((place for place, other in enumerate(left) if same_answer(each, other, depth + 1)), None)
        if match is None:
            return False
        del left[match]
    return True


def _distinct(items: Sequence[str], depth: int) -> tuple[str, ...]:
    kept: list[str] = []
    for each in items[: MAX_PARTS + 1]:
        if not any(same_answer(each, other, depth + 1) for other in kept):
            kept.append(each)
    return tuple(kept)


def _same_words(given: str, expected: str) -> bool | None:
    """For answers in words, their letters aside from case; None where neither is one."""
    texts = [unwrapped_text(each).strip() for each in (given, expected)]
    if any(each.isalpha() and len(each) == 1 for each in texts):
        letters = [CHOICE.fullmatch(each) for each in texts]
        if all(letters):
            return texts[0].strip("(). ") == texts[1].strip("(). ")
    is_words = [
        WORDS.fullmatch(text) is not None and _reads_as_words(text, each)
        for text, each in zip(texts, (given, expected), strict=True)
    ]
    if not any(is_words):
        return None
    left, right = (" ".join(text.casefold().split()).strip(" .") for text in texts)
    return left == right


def _reads_as_words(text: str, written: str) -> bool:
    r"""`\text{…}`, or three letters and more in a row: `abc` is a word here, `ab` and `xy` are products."""
    return r"\text" in written or re.search(r"[A-Za-z]{3,}", text) is not None
