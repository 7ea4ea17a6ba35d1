"""Seconds that dynamic batching takes: `python bench/packing.py [--samples 100000] [--ranks 8] [--json]`."""

import json
import random
import time
from typing import Annotated

import typer

from moonshift.core.plan import balance, pack


def main(
    samples: Annotated[int, typer.Option(help="Samples of long-tailed length.")] = 100_000,
    ranks: Annotated[int, typer.Option(help="DP ranks.")] = 8,
    cap: Annotated[int, typer.Option(help="Tokens a micro-batch.")] = 16_384,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Balance over ranks, then pack each rank's share; the bar is one second for 100,000 samples."""
    draw = random.Random(0)
    lengths = [min(8192, int(draw.lognormvariate(6, 1)) + 1) for _ in range(samples)]
    started = time.perf_counter()
    shares = balance(lengths, ranks)
    balanced = time.perf_counter()
    bins = [pack([lengths[index] for index in share], cap) for share in shares]
    packed = time.perf_counter()
    loads = [sum(lengths[index] for index in share) for share in shares]
    found = {
        "samples": samples,
        "balance_s": round(balanced - started, 4),
        "pack_s": round(packed - balanced, 4),
        "heaviest_over_mean": round(max(loads) * ranks / sum(loads), 6),
        "micro_batches": sum(len(chosen) for chosen in bins),
        "lower_bound": -(-sum(lengths) // cap),
    }
    print(json.dumps(found) if as_json else "\n".join(f"{name:<20}{value}" for name, value in found.items()))


if __name__ == "__main__":
    typer.run(main)
