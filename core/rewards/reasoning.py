"""The reward of Reasoning Gym's tasks: each task's own verifier, on the answer found in the response.

Invariant: the right answer decides only in which form an answer is looked for (a number or a text), never where.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

from ..datasets.sources import VERIFIER_TAG, gym_entry
from ..errors import RewardError
from ..types import Sample

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# a minus is a sign only where it does not follow a term: "7-3" holds 7 and 3, "= -4" holds -4
NUMBER = re.compile(r"(?:(?<![\w)])[-−])?(?<!\w)\d+(?:,\d{3})*(?:\.\d+)?", re.ASCII)
ONE_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?", re.ASCII)


def reasoning_gym_reward(sample: Sample, *, format_weight: float = 0.0) -> dict[str, float]:
    """The verdict of the task's own verifier, mixed with the format's.

    score = (1 - format_weight) · verdict + format_weight · format, all in [0, 1]. `accuracy` is 1 only for full
    marks: verifiers give part marks to some wrong answers. Where the right answer is a number, part marks are dropped:
    the verifiers give them for shared digits (13 for 3), which is no nearness. `format` is 1 where the response
    holds `<answer>…</answer>`.

    Raises RewardError where the prompt is from another source or format_weight is not in [0, 1].
    """
    if not 0 <= format_weight <= 1:
        raise RewardError(f"reward.kwargs.format_weight is {format_weight}; it must be from 0 to 1.")
    prompt = sample.prompt
    if VERIFIER_TAG not in prompt.extra:
        raise RewardError(
            f"{prompt.uid}: is not from a source reasoning_gym:TASK, so it has no verifier. "
            f"Use another reward.function, for example moonshift.core.rewards.exact:exact_match."
        )
    answer, tagged = extract_answer(sample.response, str(prompt.answer))
    verdict = _verdict(sample, answer) if answer else 0.0
    return {
        "score": (1 - format_weight) * verdict + format_weight * tagged,
        "accuracy": float(verdict >= 1.0),
        "format": float(tagged),
    }


def extract_answer(response: str, right_answer: str) -> tuple[str, bool]:
    """The answer in a response, "" where there is none, and whether it stood in `<answer>…</answer>`.

    In this order: the last tagged text; where the right answer is a number, the last number of the response (small
    chat models write "12 + 34 = 46." or "The answer is **46**"); else the last line that is not empty, without the
    marks around it and without a lead-in up to a colon.
    """
    tagged = TAGGED.findall(response)
    if tagged:
        return tagged[-1].strip(), True
    if is_number(right_answer):
        numbers = NUMBER.findall(response)
        return (numbers[-1].replace("−", "-") if numbers else ""), False
    lines = [line for line in response.splitlines() if line.strip()]
    if not lines:
        return "", False
    return lines[-1].rpartition(": ")[2].strip(" \t*`\"'").removesuffix(".").strip(" \t*`\"'"), False


def is_number(answer: str) -> bool:
    """The right answer is one plain number."""
    return ONE_NUMBER.fullmatch(answer.strip()) is not None


def _verdict(sample: Sample, answer: str) -> float:
    prompt = sample.prompt
    stored = prompt.extra[VERIFIER_TAG]
    entry = gym_entry({"prompt": prompt.text, "answer": prompt.answer, VERIFIER_TAG: stored})
    verdict = float(_verifier(stored["task"])(answer, entry))
    return float(verdict >= 1.0) if is_number(str(prompt.answer)) else verdict


@lru_cache(maxsize=64)
def _verifier(task: str) -> Callable[[str, dict[str, Any]], float]:
    """The task's `score_answer`; a task's data set is built once a process."""
    try:
        from reasoning_gym.factory import get_score_answer_fn
    except ImportError as error:
        raise RewardError("The package reasoning-gym is not installed: pip install reasoning-gym.") from error
    return cast("Callable[[str, dict[str, Any]], float]", get_score_answer_fn(task))
