r"""The reward of multiple choice: the letter that a response settles on.

Invariant: an article or a pronoun is no choice: "A dog" and "I think" name none.
"""

import re
from functools import lru_cache

from ..errors import RewardError
from ..types import Sample
from .final_answer import THINKING, THOUGHT, final_answer
from .latex_text import normalized, unwrapped_text


def multiple_choice(sample: Sample, *, letters: str = "ABCD") -> dict[str, float]:
    r"""score: 1 where the response chooses the right letter; answered: 1 where it chooses one.

    `letters`: the choices, in large letters. The right answer is one of them, bare or as `(B)`, `B.`, `B) text`.
    Looked for, in this order: the last `\boxed{…}`; the last `<answer>…</answer>`; the last "answer is B", "answer:
    B"; a response that is one letter or begins with `B)` or `B.`; the last `(B)`. Raises RewardError where the right
    answer is none of the letters.
    """
    right = _one_letter(str(sample.prompt.answer), letters)
    if right is None:
        raise RewardError(
            f"{sample.prompt.uid}: the answer {sample.prompt.answer!r:.60} is none of the choices {letters}. "
            f"Set reward.kwargs.letters, or mend the row."
        )
    chosen = chosen_letter(sample.response, letters)
    return {"score": float(chosen == right), "answered": float(chosen is not None)}


def chosen_letter(response: str, letters: str = "ABCD") -> str | None:
    """The letter that a response settles on, None where it names none."""
    boxed = final_answer(response, "boxed")
    text = response.rpartition(THOUGHT)[2]
    if boxed is not None:
        return _one_letter(unwrapped_text(normalized(boxed)), letters)
    if THINKING in text or r"\boxed" in text:
        return None
    said, alone, bracketed = _patterns(letters)
    tagged = re.findall(r"<answer>(.{0,200}?)</answer>", text, re.DOTALL)
    if tagged:
        return _one_letter(tagged[-1], letters)
    found = said.findall(text)
    if found:
        return found[-1]
    first = alone.match(text.strip())
    if first:
        return first[1]
    in_brackets = bracketed.findall(text)
    return in_brackets[-1] if in_brackets else None


def _one_letter(text: str, letters: str) -> str | None:
    """`B`, `b`, `(B)`, `B.`, `B) text`, `**B**` as B."""
    match = re.match(r"[\s*(\[]*([A-Za-z])(?:[\s*)\].:]*$|[)\].:])", text)
    letter = match[1].upper() if match else None
    return letter if letter is not None and letter in letters else None


@lru_cache(maxsize=8)
def _patterns(letters: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    if not re.fullmatch(r"[A-Z]+", letters):
        raise RewardError(f"reward.kwargs.letters is {letters!r}; write the choices as large letters, such as ABCD.")
    one = f"([{letters}])"
    lead = r"(?i:answer|choice|option)(?:\*\*)?\s*(?:(?i:is)\b\s*:?|:)"
    said = rf"{lead}[\s*$(\[]*(?:(?i:option|choice)\s+)?[\s*$(\[]*{one}(?![A-Za-z'’])(?!\s+[a-z])"
    return re.compile(said), re.compile(rf"[*(]*{one}(?:[*)]*\s*$|[).:])"), re.compile(rf"\({one}\)")
