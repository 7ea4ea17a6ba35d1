"""The learning rate as a pure function of the step: there is no scheduler state to lose."""

import math

from ..config.schema import OptimSection


def learning_rate(optim: OptimSection, step: int, total_steps: int) -> float:
    """Learning rate of `step` (1-based) out of `total_steps`.

    Linear warm-up reaches `lr` at step `lr_warmup_steps` (4 warm-up steps: 1/4, 2/4, 3/4, 1, 1 …), then constant, or
    a half cosine down to `lr * min_lr_ratio` at the last step.
    """
    if step <= optim.lr_warmup_steps:
        return optim.lr * step / optim.lr_warmup_steps
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    length = max(1, total_steps - optim.lr_warmup_steps)
    progress = min(1.0, (step - optim.lr_warmup_steps) / length)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * cosine)
