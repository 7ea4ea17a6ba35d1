"""DAPO (arXiv 2503.14476): the price of overlong answers, and dynamic sampling of groups that teach something.

Its clip-higher is `ppo_clip` with `clip_ratio_high=0.28`, its loss the aggregation `token-mean`.
Dynamic sampling never raises in mid-run: a step that finds too few groups trains on fewer, and says so in a metric.
`B` is the number of sequences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import ConfigError
from .advantage import group_statistics, row_values
from .checks import check_number, check_rows


def overlong_penalty(
    lengths: Tensor, *, max_response_length: int, buffer_length: int, penalty_factor: float = 1.0
) -> Tensor:
    """What is added to a sequence's reward for its length: 0, then falling linearly (arXiv 2503.14476, eq. 13).

    With `L = max_response_length - buffer_length`: 0 up to `L`, `-(length - L) / buffer_length · penalty_factor`
    inside the buffer, and `-penalty_factor` at the longest response allowed and beyond.

    Example: at most 20 tokens with a buffer of 4: lengths 16, 17, 20 give 0, -0.25, -1.

    Args:
        lengths: `[B]` int64, response tokens.
        max_response_length: tokens, >= `buffer_length`.
        buffer_length: tokens, >= 1.
        penalty_factor: reward, >= 0.

    Returns:
        `[B]` float64, <= 0.

    Raises:
        ConfigError: a number out of its bound.
        ValueError: `lengths` is not `[B]` int64.
    """
    _check_count("buffer_length", buffer_length, at_least=1)
    _check_count("max_response_length", max_response_length, at_least=buffer_length)
    check_number("penalty_factor", penalty_factor)
    check_rows(len(lengths), torch.int64, lengths=lengths)
    excess = (lengths - (max_response_length - buffer_length)).double().clamp(min=0, max=buffer_length)
    return 0.0 - excess / buffer_length * penalty_factor  # from 0, or the shortest answers would get -0


def has_signal(metric: Tensor, groups: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """At each row, whether its group tells its samples apart by `metric`: max != min over its valid rows.

    A group with fewer than two valid samples has no signal. Rows that are not valid read what holds for their group.

    Example: metric 1, 0, 1, 1 in groups 0, 0, 1, 1 gives true, true, false, false.

    Args:
        metric: `[B]`, float32 or float64, such as the score of each sequence.
        groups: `[B]` int64; need not be dense or sorted.
        valid: `[B]` bool, or None when nothing is missing.

    Returns:
        `[B]` bool.

    Raises:
        ValueError: wrong shape or type.
        NonFiniteInputError: the metric of a valid row is NaN or infinite.
    """
    if valid is None:
        valid = torch.ones(len(groups), dtype=torch.bool, device=groups.device)
    check_rows(len(groups), torch.int64, groups=groups)
    check_rows(len(groups), torch.bool, valid=valid)
    return group_statistics(row_values("metric", metric, valid), groups, valid).has_signal


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBuffer:
    """Which groups a step trains on, which wait for the next one, and how many more to generate.

    One step: generate `num_to_generate` groups, call `received`, and again until it is 0; train on `trained`; go on
    with `next_step()`, whose `carried` belongs into the checkpoint. Carried groups come first, and there are always
    fewer of them than a step needs, so that none gets older than one step as long as no more is generated than asked.

    Example: 4 needed. 4 generated, 2 of them with signal: 2 are missing, so 4 more are asked for; 3 of those have
    signal. The step trains on the first 4 of the 5, and 1 is carried over: the next step begins by asking for 3.

    Raises:
        ConfigError: `num_needed` < 1, `max_refills` < 0 or `refill_factor` < 1.
    """

    num_needed: int
    """Groups that a step trains on."""
    max_refills: int
    """How often a step may ask for more after its first generation."""
    refill_factor: float = 2.0
    """A refill asks for this many groups for each that is missing, but never for more than a step needs."""
    carried: tuple[int, ...] = ()
    """Groups with signal left over from the step before, oldest first."""
    kept: tuple[int, ...] = ()
    """Groups with signal of this step, in the order of the plan."""
    num_dropped: int = 0
    """Groups of this step without signal."""
    num_generations: int = 0
    """How often this step has generated: the first time, and each refill."""

    def __post_init__(self) -> None:
        _check_count("num_needed", self.num_needed, at_least=1)
        _check_count("max_refills", self.max_refills, at_least=0)
        check_number("refill_factor", self.refill_factor, at_least=1)

    @property
    def num_missing(self) -> int:
        """Groups that the step would still need."""
        return max(self.num_needed - len(self.carried) - len(self.kept), 0)

    @property
    def num_to_generate(self) -> int:
        """Groups to generate before training; 0: go on with what there is, full or not."""
        if self.num_generations == 0:
            return self.num_missing
        if self.num_generations > self.max_refills:
            return 0
        return min(math.ceil(self.num_missing * self.refill_factor), self.num_needed)

    @property
    def trained(self) -> tuple[int, ...]:
        """The groups to train on now, oldest first; empty when no group had signal: then skip the update."""
        return (self.carried + self.kept)[: self.num_needed]

    @property
    def surplus(self) -> tuple[int, ...]:
        """The groups that the next step trains on first."""
        return (self.carried + self.kept)[self.num_needed :]

    def received(self, groups: Sequence[int], with_signal: Sequence[bool]) -> "GroupBuffer":
        """The buffer after one generation: `groups` in the order of the plan, and whether each has signal."""
        kept = tuple(group for group, keep in zip(groups, with_signal, strict=True) if keep)
        return replace(
            self,
            kept=self.kept + kept,
            num_dropped=self.num_dropped + len(groups) - len(kept),
            num_generations=self.num_generations + 1,
        )

    def next_step(self) -> "GroupBuffer":
        """The buffer that the next step begins with."""
        return replace(self, carried=self.surplus, kept=(), num_dropped=0, num_generations=0)

    def metrics(self) -> dict[str, float]:
        """The step in numbers of groups; `training/filter_groups/missing` > 0: it was trained on fewer than asked."""
        numbers = {
            "kept": len(self.kept),
            "dropped": self.num_dropped,
            "carried_in": len(self.carried),
            "carried_out": len(self.surplus),
            "trained": len(self.trained),
            "missing": self.num_missing,
            "refills": max(self.num_generations - 1, 0),
        }
        return {f"training/filter_groups/{name}": float(number) for name, number in numbers.items()}


def _check_count(argument: str, value: int, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"{argument} is {value!r}; it must be a whole number >= {at_least}.")
