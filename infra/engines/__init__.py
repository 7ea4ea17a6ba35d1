"""Inference engines behind the `RolloutEngine` contract of `moonshift.core.types`."""
