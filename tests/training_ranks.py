"""Training steps by one or several model workers without Ray, as a program: `python -m tests.training_ranks SPEC`.

The ranks walk through the stages side by side, as the calls of a run would lead them.
"""

import json
import multiprocessing
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DEADLINE_S = 150.0
SETTINGS: dict[str, Any] = {
    "data.train_files": "sums:?max=9",
    "data.train_batch_size": 4,
    "data.max_prompt_length": 8,
    "data.max_response_length": 6,
    "actor_rollout_ref.model.path": "builtin:char-llama",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "critic.optim.lr": 1e-3,
    "trainer.total_training_steps": 5,
    "trainer.device": "cpu",
    "trainer.num_threads": 1,
}
PROMPTS = [[3, 4], [5, 6, 7], [8], [9, 10, 11, 4, 5]]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is run: what was loaded is saved to `folder/0/saved`; a step's stages go to `folder/<step>/<stage>`, and the
    checkpoint after it to `folder/<step>/saved`."""

    world: int
    model: str
    folder: str
    steps: list[int]
    settings: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    redo: str | None = None
    """redo log that each step applies in place of one of its own"""


def run(spec: Spec) -> list[dict[str, float]]:
    """Do it in processes of its own; the metrics of each step's stages, from rank 0."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.training_ranks", json.dumps(asdict(spec))],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2 * DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main(text: str) -> None:
    spec = Spec(**json.loads(text))
    context = multiprocessing.get_context("spawn")
    addresses, results = context.Queue(), context.Queue()
    started = [context.Process(target=one, args=(spec, rank, addresses, results)) for rank in range(spec.world)]
    for process in started:
        process.start()
    try:
        told = results.get(timeout=DEADLINE_S)
        for process in started:
            process.join(DEADLINE_S)
        assert all(process.exitcode == 0 for process in started), [process.exitcode for process in started]
    finally:
        for process in started:
            process.kill()
    print(json.dumps(told))


def one(spec: Spec, rank: int, addresses: "Queue[Any]", results: "Queue[Any]") -> None:
    """One rank's life."""
    from moonshift.core.config import load_config, to_json
    from moonshift.core.plan import make_plan
    from moonshift.infra.workers.model import ModelWorker

    world = {"trainer.n_gpus_per_node": spec.world}
    settings = load_config(None, (), environ={}, code=SETTINGS | world | spec.settings).config
    worker = ModelWorker(to_json(settings), make_plan(settings, 100), rank)
    if spec.world > 1:
        address = worker.open_store("127.0.0.1") if rank == 0 else addresses.get(timeout=DEADLINE_S)
        for _ in range(spec.world - 1 if rank == 0 else 0):
            addresses.put(address)
        worker.join(address)
    worker.load(spec.model, spec.checkpoint)
    save(worker, Path(spec.folder) / "0")
    told: list[dict[str, float]] = []
    for number in spec.steps:
        folder = Path(spec.folder) / str(number)
        metrics = {} if spec.redo else stages_of(worker, folder, number)
        told.append(metrics | worker.update(spec.redo or str(folder / "advantage"), number))
        save(worker, folder)
    if rank == 0:
        results.put(told)


def save(worker: Any, folder: Path) -> None:
    (folder / "saved").mkdir(parents=True, exist_ok=True)
    worker.save(str(folder / "saved"))
    worker.ranks.gather(None)


def stages_of(worker: Any, folder: Path, number: int) -> dict[str, float]:
    """The stages before an update; what a rank finds there when it begins one is whole."""
    from moonshift.core.training.advantages import Stages
    from moonshift.core.types import SamplingParams
    from moonshift.infra.workers.model import RolloutOrder
    from moonshift.infra.workers.reward import write_scores

    count = SETTINGS["actor_rollout_ref.rollout.n"]
    samples = len(PROMPTS) * count
    order = RolloutOrder(
        prompt_ids=PROMPTS,
        uids=[str(index) for index in range(len(PROMPTS))],
        epochs=[0] * len(PROMPTS),
        seeds=[1000 * number + index for index in range(samples)],
        params=SamplingParams(n=count, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=6, stop_ids=(1,)),
    )
    stages = Stages(rollout=str(folder / "rollout"), score=str(folder / "score"), log_probs=str(folder / "log_probs"))
    worker.rollout(order, stages.rollout)
    if worker.rank == 0:
        write_scores({"score": [float(index * 7 % 5 - 1) for index in range(samples)]}, Path(stages.score))
    worker.ranks.gather(None)
    metrics = worker.log_probs(stages.rollout, stages.log_probs)
    worker.ranks.gather(None)
    metrics |= worker.advantage(stages, str(folder / "advantage"), None)
    worker.ranks.gather(None)
    return metrics


if __name__ == "__main__":
    main(sys.argv[1])
