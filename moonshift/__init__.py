"""Moonshift: LLM post-training as a nightly workflow that cannot lose work."""

__version__ = "0.1.0"
