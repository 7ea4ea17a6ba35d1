"""Muon: momentum made orthogonal, matrix by matrix (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

Invariant: the numbers do not depend on how a matrix is cut into shards. The Newton–Schulz iteration sees it whole, in
float32 (on a GPU TF32); `torch.optim.Muon` iterates in bfloat16, on the shards' own partial sums.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .parallel import sharded_like, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""of the quintic, which has no fixed point at 1 but rises fast from 0: singular values end between 0.7 and 1.2"""
ITERATIONS = 5
BUFFER = "momentum_buffer"


class Muon(torch.optim.Optimizer):
    """W ← (1 − lr · weight_decay) · W − lr · 0.2 · √max(rows, columns) · O, with O of Nesterov's momentum.

    The factor gives an update the size of AdamW's, so that rates and decays carry over (arXiv 2502.16982, eq. 4).
    Every rank gathers each matrix and computes all of it, but keeps its own shard alone of momentum and weights.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; all ranks take it together. `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group["lr"], group["momentum"], group["weight_decay"])

    def _step(self, parameter: nn.Parameter, lr: float, momentum: float, weight_decay: float) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if BUFFER not in state:
            state[BUFFER] = torch.zeros_like(gradient)
        buffer = state[BUFFER].lerp_(gradient, 1 - momentum)
        update = sharded_like(orthogonalised(whole(gradient.lerp(buffer, momentum))), parameter)
        parameter.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonalised(matrix: Tensor) -> Tensor:
    """U S' Vᵀ of `matrix` = U S Vᵀ `[rows, columns]`, S' near 1, by `ITERATIONS` of Newton–Schulz; 0 of 0."""
    a, b, c = COEFFICIENTS
    found = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    found = found / found.norm().clamp(min=1e-7)  # no singular value above 1
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found if matrix.shape[0] <= matrix.shape[1] else found.T
