"""What the results of a stage's samples come to: metrics over those that have a reward, and the error rate."""

from collections.abc import Sequence

from ..errors import RewardError
from .graded import Graded

_SHOWN = 5
_LONGEST = 600
ERROR_RATE = "reward/error_rate"
"""Share of a stage's samples that have an error instead of a reward, a metric."""


def means(graded: Sequence[Graded]) -> dict[str, float]:
    """Mean of each component but `score`, as `reward/<name>/mean`, over the samples that have a reward; error rate.

    Example: rewards 1, 0, an error and 1, with a component `format` equal to them, give `reward/format/mean` 2/3 and
    `reward/error_rate` 0.25.
    """
    numbers = [each.components for each in graded if each.components is not None]
    names = [name for name in numbers[0] if name != "score"] if numbers else []
    found = {f"reward/{name}/mean": sum(each[name] for each in numbers) / len(numbers) for name in names}
    return found | {ERROR_RATE: error_rate(graded)}


def error_rate(graded: Sequence[Graded]) -> float:
    """Share of the samples without a reward; 0 of none."""
    return sum(each.error is not None for each in graded) / max(1, len(graded))


def sample_names(uids: Sequence[str], samples_per_prompt: int) -> tuple[list[str], list[int]]:
    """Prompt's uid and place in the group of each sample, in row order; `uids`: of the prompts."""
    return [uid for uid in uids for _ in range(samples_per_prompt)], list(range(samples_per_prompt)) * len(uids)


def check_error_rate(graded: Sequence[Graded], uids: Sequence[str], indexes: Sequence[int], max_rate: float) -> None:
    """Raise RewardError when more than `max_rate` of the samples have an error, naming the first five.

    `uids` and `indexes`: of each sample, its prompt's uid and its place in the group.
    """
    if error_rate(graded) <= max_rate:
        return
    failed = [(uid, index, each.error) for uid, index, each in zip(uids, indexes, graded, strict=True) if each.error]
    lines = [f"  - {uid}, sample {index}: {_shortened(error)}" for uid, index, error in failed[:_SHOWN]]
    more = f"\n  … and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    raise RewardError(
        f"{len(failed)} of {len(graded)} samples have an error instead of a reward, more than "
        f"reward.max_error_rate={max_rate:g} allows:\n" + "\n".join(lines) + more + "\nMend the reward, or raise "
        "reward.max_error_rate: samples with an error are then left out of training, never scored 0."
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
