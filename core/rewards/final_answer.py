r"""Finds the final answer in a response that does mathematics.

Invariant: the last box decides. One that is empty or never closed is no answer, and no earlier one takes its place;
the time needed grows with the length of the response and no faster.
"""

import re
from typing import Literal

Extraction = Literal["boxed", "flexible"]

BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
JOINED = re.compile(r"[\s$]*(?:,?\s*(?:and|or)|[,;])[\s$]*|[\s$]*(?:\\text\{\s*(?:and|or)\s*\})[\s$]*")
"""All that may stand between boxes that are one answer together."""
TAG = re.compile(r"<answer>([^<]*(?:<(?!/?answer>)[^<]*)*)</answer>")
GSM8K = re.compile(r"####[ \t]*([^\n]+)")
SAID = re.compile(r"\banswer\s*(?:\*\*)?\s*(?:is\b\s*:?|:)(?:\*\*)?[ \t]*(?=\S)", re.IGNORECASE)
IN_DOLLARS = re.compile(r"\$\$([^$]+)\$\$|\$([^$\n]+)\$")
NUMBER = re.compile(r"(?:(?<![\w)])[-−])?(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?%?", re.ASCII)
MORE = re.compile(r"\s*(?:,?\s*(?:and|or)\b|,)\s*\$")
"""After a formula: the next part of one answer."""
SENTENCE_END = re.compile(r"[.!?](?=\s|$)(?!\d)")
THINKING, THOUGHT = "<think>", "</think>"
MAX_ANSWER = 2000
"""Characters; whatever is longer is no final answer."""


def final_answer(response: str, extraction: Extraction = "flexible") -> str | None:
    r"""The answer as it was written, without the marks around it; None where there is none.

    After `</think>` where the response thinks; none where it never stops to think. `boxed`: the last `\boxed{…}` and
    nothing else; boxes with only "and", "or" or a comma between them are one answer of several parts. `flexible`: where
    there is no box at all, the last `<answer>…</answer>`; else the last line after `####`; else what follows the last
    "answer is" or "answer:"; else the whole response where it is one short line; else the last `$…$`; else the last
    number.
    """
    text = response.rpartition(THOUGHT)[2]
    if THINKING in text:
        return None
    boxes = list(BOX.finditer(text))
    if boxes:
        return _tidy(_boxed(text, boxes))
    if extraction == "boxed":
        return None
    return _tidy(_unboxed(text))


def without_box(answer: str) -> str:
    r"""A right answer as data sets store it: the last `\boxed{…}` of a solution, or what follows its last `####`."""
    boxes = list(BOX.finditer(answer))
    if boxes:
        inside = _boxed(answer, boxes)
        return answer if inside is None else inside
    marked = GSM8K.findall(answer)
    return marked[-1] if marked else answer


def _tidy(answer: str | None) -> str | None:
    bare = "" if answer is None else answer.strip()
    return bare if bare and len(bare) <= MAX_ANSWER else None


def _boxed(text: str, boxes: list[re.Match[str]]) -> str | None:
    last = _content(text, boxes[-1].end())
    if last is None or not last[0].strip():
        return None
    parts, start = [last[0]], boxes[-1].start()
    for box in reversed(boxes[:-1]):
        content = _content(text, box.end())
        if content is None or content[1] > start or not JOINED.fullmatch(text, content[1], start):
            break
        parts.insert(0, content[0])
        start = box.start()
    return ", ".join(parts)


def _content(text: str, start: int) -> tuple[str, int] | None:
    """What stands in the braces that open at `start`, and the place after them; None: not closed in time."""
    if not text.startswith("{", start):
        return None
    depth = 0
    place = start
    end = min(len(text), start + MAX_ANSWER + 2)
    while place < end:
        character = text[place]
        if character == "\\":
            place += 2
            continue
        depth += (character == "{") - (character == "}")
        place += 1
        if depth == 0:
            return text[start + 1 : place - 1], place
    return None


def _unboxed(text: str) -> str | None:
    for pattern in (TAG, GSM8K):
        found = pattern.findall(text)
        if found:
            return found[-1]
    said = max((match.end() for match in SAID.finditer(text)), default=None)
    if said is not None:
        return _first_part(text[said:].partition("\n")[0])
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) == 1 and len(lines[0]) <= 100 and not re.search(r"[A-Za-z]{2,} +[A-Za-z]{2,}", lines[0]):
        return lines[0].strip().strip("*")
    formulas = IN_DOLLARS.findall(text)
    if formulas:
        return formulas[-1][0] or formulas[-1][1]
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _first_part(said: str) -> str:
    """Of "$5$, because …" the formula; of "5 apples. So" the first sentence, without the marks of Markdown."""
    bare = said.strip().strip("*`_ ")
    formula = IN_DOLLARS.match(bare)
    if formula and not MORE.match(bare, formula.end()):
        return formula[1] or formula[2]
    stop = SENTENCE_END.search(bare)
    return (bare[: stop.start()] if stop else bare).strip("*`_ ")
