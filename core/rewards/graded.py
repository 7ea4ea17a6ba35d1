"""What grading one sample gives: its score and components, or the reason why it has none."""

from dataclasses import dataclass

REWARD_ERROR = "reward_error"
"""Column of the reasons in a stage's output, empty where there is a reward."""


@dataclass(frozen=True, slots=True)
class Graded:
    """Exactly one of the two is set. Example: `Graded({"score": 1.0, "format": 0.0}, None)`.

    Raises ValueError where both or neither are given, or `components` has no `score`.
    """

    components: dict[str, float] | None
    """finite numbers by name, `score` (what is trained on) among them"""
    error: str | None
    """kind of the error and message, with the user's own traceback where the reward raised"""

    def __post_init__(self) -> None:
        if (self.components is None) == (self.error is None):
            raise ValueError("Graded takes components or an error, and not both.")
        if self.components is not None and "score" not in self.components:
            raise ValueError(f"Graded has no 'score' among {sorted(self.components)}.")
