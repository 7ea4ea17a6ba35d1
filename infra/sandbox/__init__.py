"""Running code that nobody trusts: the answers of a model."""

from .box import Box, Outcome, Protection, run

__all__ = ["Box", "Outcome", "Protection", "run"]
