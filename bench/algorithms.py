"""How long the algorithms take: the advantages and every policy loss, forward and backward, on one core.

    python bench/algorithms.py [--rows 720] [--width 1024] [--repeats 5] [--json]

Prints the median of the repeats in milliseconds, after one warm-up; `--json` prints one object for a machine to read.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from moonshift.core.algorithms import PolicyLoss, aggregate, grpo
from moonshift.core.algorithms.policy_losses import POLICY_LOSSES
from moonshift.core.algorithms.rollout_correction import CorrectionRule, rollout_correction


def batch(rows: int, width: int) -> dict[str, Tensor]:
    """Float32 tensors `[rows, width]` as a step has them: groups of eight, responses from 1 to `width` tokens."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, width, generator=generator)
    mask = torch.arange(width)[None] < torch.randint(1, width + 1, (rows, 1), generator=generator)
    rewards = torch.zeros(rows, width)
    rewards[:, 0] = torch.randint(0, 2, (rows,), generator=generator).float()
    return {
        "old": old,
        "log_probs": old + 0.05 * torch.randn(rows, width, generator=generator),
        "advantages": torch.randn(rows, 1, generator=generator).expand(rows, width).contiguous(),
        "mask": mask,
        "rewards": rewards,
        "groups": torch.arange(rows) // 8,
    }


def measures(data: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    tensors = (data["log_probs"], data["old"], data["advantages"], data["mask"])
    rule = CorrectionRule(rollout_is="token", rollout_rs="seq_mean_k1", rollout_rs_threshold=1.1)
    found: dict[str, Callable[[], object]] = {
        "grpo advantages": lambda: grpo(data["rewards"], data["mask"], data["groups"]),
        "rollout correction": lambda: rollout_correction(data["log_probs"], data["old"], data["mask"], rule),
    }
    for name, loss in POLICY_LOSSES.items():
        selected: dict[str, Tensor] = {}
        select = loss.select
        if select is not None:
            seed = {"seed": 0} if "seed" in loss.select_options else {}
            found[f"{name} selection"] = lambda select=select, seed=seed: select(*tensors, **seed)
            selected = {"selected": select(*tensors, **seed)}
        mode = loss.agg_mode or "token-mean"
        found[f"{name} loss"] = lambda compute=loss.compute, selected=selected, mode=mode: forward_and_backward(
            compute, tensors, mode, **selected
        )
    return found


def forward_and_backward(
    compute: Callable[..., PolicyLoss], tensors: tuple[Tensor, ...], mode: str, **selected: Tensor
) -> Tensor:
    leaf = tensors[0].clone().requires_grad_()
    mask = tensors[3]
    loss = compute(leaf, *tensors[1:], **selected)

    aggregate(loss.token_losses, mask, mode, num_tokens=int(mask.sum()), num_sequences=len(mask)).backward()
    assert leaf.grad is not None
    return leaf.grad


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the advantages and policy losses on one core.")
    parser.add_argument("--rows", type=int, default=720)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = batch(options.rows, options.width)
    results = {name: milliseconds(call, options.repeats) for name, call in measures(data).items()}
    size = {"rows": options.rows, "width": options.width, "tokens": int(data["mask"].sum()), "threads": 1}
    if options.json:
        print(json.dumps(size | {"torch": torch.__version__, "milliseconds": results}))
        return
    table = Table("what", "milliseconds", title=f"{options.rows} x {options.width} float32, one core")
    table.columns[1].justify = "right"
    for name, value in results.items():
        table.add_row(name, f"{value:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
