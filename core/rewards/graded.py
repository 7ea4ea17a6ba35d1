"""What grading one sample came to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """Numbers or a reason; exactly one of the two is set.

    Example: `Graded(components={"score": 1.0}, error=None)`, `Graded(components=None, error="raised KeyError: 'x'")`.
    """

    components: dict[str, float] | None
    """finite numbers by name, `score` among them"""
    error: str | None
    """why there is no number"""

    def __post_init__(self) -> None:
        assert (self.components is None) != (self.error is None), "a sample has numbers or a reason"
