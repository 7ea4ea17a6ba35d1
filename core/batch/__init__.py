"""The container of every stage: ragged token columns, dense columns and Arrow columns over the same rows."""

from .batch import Batch
from .ragged import Ragged

__all__ = ["Batch", "Ragged"]
