"""Samples that are graded while the batch is still generated: each once, each its own result, nothing lost."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
import torch

from moonshift.core.batch import Batch, Ragged
from moonshift.core.config import load_config, to_json
from moonshift.core.config.schema import Config
from moonshift.core.types import Prompt
from moonshift.infra.cluster import cluster
from moonshift.infra.rewards import Finished, RewardStream
from moonshift.infra.roles import RewardHandle
from moonshift.infra.workers.reward import RewardWorker

COUNTED = """
import pathlib
def score(sample):
    with open(pathlib.Path(__file__).with_name("calls"), "a") as calls:
        calls.write(f"{sample.prompt.uid} {sample.response}\\n")
    if sample.response == "hang":
        while True: pass
    return float(sample.response.removeprefix("r"))
"""
BATCHED = """
def score(completions, **columns):
    return [float(len(completions))] * len(completions)
"""


@pytest.fixture
def local_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MOONSHIFT_HOME", str(tmp_path))
    with cluster(60):
        yield


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(uid=f"u{n}", messages=({"role": "user", "content": "p"},), text="p", answer=None, source="t", extra={})
        for n in range(count)
    ]


def finished(row: int, response: str | None = None) -> Finished:
    return Finished(row=row, response=response or f"r{row}", finish_reason="stop", response_tokens=2)


def saved(folder: Path, responses: list[str], per_prompt: int) -> str:
    groups = torch.arange(len(responses) // per_prompt).repeat_interleave(per_prompt)
    Batch(
        {
            "group": groups,
            "response": responses,
            "finish_reason": ["stop"] * len(responses),
            "response_ids": Ragged.from_list([[1, 2]] * len(responses), torch.int64),
        }
    ).save(folder)
    return str(folder)


@contextmanager
def worker(folder: Path, code: str, timeout_s: float = 10.0) -> Iterator[RewardWorker]:
    made = RewardWorker(to_json(config(folder, code, timeout_s)))
    with made.pool:
        yield made


def config(folder: Path, code: str, timeout_s: float = 10.0) -> Config:
    (folder / "reward.py").write_text(code, encoding="utf-8")
    changes = {
        "data.train_files": "x",
        "data.max_prompt_length": 8,
        "data.max_response_length": 8,
        "data.train_batch_size": 2,
        "actor_rollout_ref.model.path": "x",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2,
        "reward.function": f"{folder}/reward.py:score",
        "reward.timeout_s": timeout_s,
        "reward.processes_per_worker": 2,
    }
    return load_config(None, (), environ={}, code=changes).config


def calls(folder: Path) -> list[str]:
    return sorted((folder / "calls").read_text(encoding="utf-8").splitlines())


def test_what_arrives_is_graded_before_the_batch_is_asked_for_and_only_once(tmp_path: Path) -> None:
    with worker(tmp_path, COUNTED) as made:
        assert made.expect(prompts(2), 2)
        made.arrived([finished(3), finished(0)])
        made.arrived([finished(1)])
        end = time.monotonic() + 30
        while not (tmp_path / "calls").is_file() or len(calls(tmp_path)) < 3:
            assert time.monotonic() < end, "nothing was graded before it was asked for"
            time.sleep(0.02)
        graded, tail_s = made.grade(prompts(2), saved(tmp_path / "r", ["r0", "r1", "r2", "r3"], 2), range(4))
    assert graded == [[{"score": float(row)}, None] for row in range(4)]
    assert calls(tmp_path) == ["u0 r0", "u0 r1", "u1 r2", "u1 r3"]  # the third row never arrived
    assert tail_s >= 0


def test_a_result_is_used_for_the_very_sample_alone(tmp_path: Path) -> None:
    """A rollout that was repeated after its worker was lost may hold other responses than those that arrived."""
    with worker(tmp_path, COUNTED) as made:
        made.expect(prompts(2), 2)
        made.arrived([finished(0, "r7"), finished(1)])
        made.expect(prompts(2), 2)
        made.arrived([finished(0, "r8"), finished(2)])
        graded, _ = made.grade(prompts(2), saved(tmp_path / "r", ["r9", "r1", "r2", "r3"], 2), range(4))
    assert [each[0] for each in graded] == [{"score": value} for value in (9.0, 1.0, 2.0, 3.0)]
    assert calls(tmp_path).count("u1 r2") == 1


def test_a_hung_sample_that_arrived_costs_itself_alone(tmp_path: Path) -> None:
    with worker(tmp_path, COUNTED, timeout_s=1.0) as made:
        made.expect(prompts(2), 2)
        made.arrived([finished(row, "hang" if row == 1 else None) for row in range(4)])
        graded, tail_s = made.grade(prompts(2), saved(tmp_path / "r", ["r0", "hang", "r2", "r3"], 2), range(4))
    assert [each[0] for each in graded] == [{"score": 0.0}, None, {"score": 2.0}, {"score": 3.0}]
    assert "within 1 s" in str(graded[1][1])
    assert calls(tmp_path).count("u0 hang") == 1
    assert tail_s > 0.9


def test_a_function_of_the_whole_batch_still_gets_it_whole(tmp_path: Path) -> None:
    with worker(tmp_path, BATCHED) as made:
        assert not made.expect(prompts(2), 2)
        made.arrived([finished(0)])
        graded, _ = made.grade(prompts(2), saved(tmp_path / "r", ["r0", "r1", "r2", "r3"], 2), range(4))
    assert graded == [[{"score": 4.0}, None]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_samples_reach_their_workers_from_another_process(tmp_path: Path, local_ray: None, workers: int) -> None:
    @ray.remote
    def generate(stream: RewardStream) -> None:
        for row in reversed(range(20)):
            stream.send(finished(row))
        stream.flush()

    settings = config(tmp_path, COUNTED)
    actors = [ray.remote(RewardWorker).options(num_cpus=0).remote(to_json(settings)) for _ in range(workers)]
    handle = RewardHandle(actors, settings, lambda kind, detail: None)
    stream = handle.stream(prompts(4), 5)
    assert stream is not None
    ray.get(generate.remote(stream))
    scored = handle.score(
        prompts(4), saved(tmp_path / "r", [f"r{row}" for row in range(20)], 5), 20, str(tmp_path / "s")
    )
    for actor in actors:
        ray.kill(actor)  # pyright: ignore[reportArgumentType] a proxy is a handle
    assert [each.components for each in scored.graded] == [{"score": float(row)} for row in range(20)]
    assert calls(tmp_path) == sorted(f"u{row // 5} r{row}" for row in range(20))
