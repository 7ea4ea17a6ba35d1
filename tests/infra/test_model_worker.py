"""The worker that holds a model, in this process: stages hand ids on, never text."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from moonshift.core.batch import Batch, Ragged
from moonshift.core.config import load_config, to_json
from moonshift.core.config.schema import Config
from moonshift.core.plan import make_plan
from moonshift.core.training.advantages import Stages, compute_advantages
from moonshift.core.types import Prompt, SamplingParams
from moonshift.infra.files import folder_digest
from moonshift.infra.workers.model import ModelWorker
from moonshift.infra.workers.orders import RolloutOrder
from moonshift.infra.workers.reward import RewardWorker, write_scores

ONE = {
    "data.train_files": "sums:?max=9",
    "data.train_batch_size": 2,
    "data.max_response_length": 4,
    "actor_rollout_ref.model.path": "builtin:char-llama",
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
    "trainer.total_training_steps": 3,
    "trainer.device": "cpu",
    "trainer.num_threads": 1,
}


def config(**changes: Any) -> Config:
    return load_config(
        None, (), environ={}, code=ONE | {key.replace("__", "."): value for key, value in changes.items()}
    ).config


def worker(char_llama: Path, settings: Config) -> ModelWorker:
    made = ModelWorker(to_json(settings), make_plan(settings, 100))
    made.load(str(char_llama), None)
    return made


def order() -> RolloutOrder:
    params = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4, stop_ids=(1,))
    return RolloutOrder(
        prompt_ids=[[3, 4], [5, 6, 7]], uids=["a", "b"], epochs=[0, 0], seeds=[1, 2, 3, 4], params=params
    )


class NoEncoder:
    """A tokenizer that decodes, and raises where anything is encoded."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if "encode" in name and "decode" not in name:
            raise AssertionError("text was encoded again between rollout and update")
        return getattr(self._inner, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("text was encoded again between rollout and update")

    def __len__(self) -> int:
        return len(self._inner)


@pytest.mark.case("T02")
@pytest.mark.parametrize("mini", [2, 1])
def test_the_ids_and_log_probs_of_an_update_are_those_sampled(char_llama: Path, tmp_path: Path, mini: int) -> None:
    settings = config(actor_rollout_ref__actor__ppo_mini_batch_size=mini)
    made = worker(char_llama, settings)
    made.tokenizer = NoEncoder(made.tokenizer)  # pyright: ignore[reportAttributeAccessIssue]
    stages = Stages(rollout=str(tmp_path / "r"), score=str(tmp_path / "s"), log_probs=str(tmp_path / "l"))
    made.rollout(order(), stages.rollout)
    write_scores({"score": [1.0, 0.0, 0.0, 1.0]}, Path(stages.score))
    made.log_probs(stages.rollout, stages.log_probs)
    made.advantage(stages, str(tmp_path / "a"), None)
    made.update(str(tmp_path / "a"), 1)
    sampled, trained = Batch.load(tmp_path / "r"), Batch.load(tmp_path / "a")
    assert [row.tolist() for row in trained.rows("response_ids")] == [
        row.tolist() for row in sampled.rows("response_ids")
    ]
    name = "old_log_probs" if mini == 1 else "rollout_log_probs"
    torch.testing.assert_close(
        trained.ragged(name).values, sampled.ragged("rollout_log_probs").values, atol=1e-5, rtol=0
    )  # fmt: skip


def test_every_step_of_a_worker_has_the_same_places(char_llama: Path, tmp_path: Path) -> None:
    """Whatever came between: a second load, as after a crash, a checkpoint, a validation."""
    made = worker(char_llama, config())
    keys: list[set[str]] = []
    for step in (1, 2):
        folder = tmp_path / str(step)
        stages = Stages(rollout=str(folder / "r"), score=str(folder / "s"), log_probs=str(folder / "l"))
        metrics = made.rollout(order(), stages.rollout)
        write_scores({"score": [1.0, 0.0, 0.0, 1.0]}, Path(stages.score))
        metrics |= made.log_probs(stages.rollout, stages.log_probs)
        made.advantage(stages, str(folder / "a"), None)
        metrics |= made.update(str(folder / "a"), step)
        keys.append({key for key in metrics if key.startswith(("memory/", "perf/"))})
        assert all(value > 0 for key, value in metrics.items() if key.startswith("memory/"))
        if step == 1:
            (folder / "saved").mkdir()
            saved = made.save(str(folder / "saved"))
            made.rollout(order(), str(folder / "validation"))
            made.load(str(char_llama), str(folder / "saved"))
            assert saved["memory/save/peak_rss_gb"] >= saved["memory/before_save/rss_gb"] > 0
    assert keys[0] == keys[1]
    places = {key.split("/")[1] for key in keys[0] if key.startswith("memory/")}
    assert places == {
        *(f"{when}_{stage}" for when in ("before", "after") for stage in ("load", "rollout", "log_prob", "update")),
        *("load", "rollout", "log_prob", "update", "after_weight_sync", "after_sleep"),
    }
    assert {"perf/max_memory_rss_gb", "perf/cpu_memory_used_gb", "perf/tflop/actor"} <= keys[0]
    assert not any("mfu" in key for key in keys[0])


def stages_of(folder: Path, ids: list[list[int]], reasons: list[str], scores: list[float]) -> Stages:
    """Stages of one group, written as the workers write them."""
    rollouts = Batch(
        {
            "prompt_ids": Ragged.from_list([[3]] * len(ids), torch.int64),
            "response_ids": Ragged.from_list(ids, torch.int64),
            "rollout_log_probs": Ragged.from_list([[-0.5] * len(row) for row in ids], torch.float32),
            "finish_reason": reasons,
            "group": torch.zeros(len(ids), dtype=torch.int64),
        }
    )
    rollouts.save(folder / "r")
    write_scores({"score": scores}, folder / "s")
    Batch({}).save(folder / "l")
    return Stages(rollout=str(folder / "r"), score=str(folder / "s"), log_probs=str(folder / "l"))


@pytest.mark.case("G05")
def test_a_sample_that_was_cut_off_is_left_out_of_the_loss_on_request(tmp_path: Path) -> None:
    stages = stages_of(tmp_path, [[5, 6, 7, 8], [5, 2]], ["length", "stop"], [1.0, 0.0])
    redo, metrics = compute_advantages(stages, config(algorithm__mask_truncated=True))
    assert [row.tolist() for row in redo.rows("loss_mask")] == [[False] * 4, [True] * 2]
    assert metrics["training/masked_samples"] == 1
    kept, metrics = compute_advantages(stages, config())
    assert [row.tolist() for row in kept.rows("loss_mask")] == [[True] * 4, [True] * 2]
    assert metrics["training/masked_samples"] == 0


@pytest.mark.case("G02")
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_response_is_graded_beside_its_own_prompt(tmp_path: Path, workers: int) -> None:
    (tmp_path / "echo.py").write_text(
        "def score(sample):\n    return float(sample.response.startswith(sample.prompt.text) "
        "and sample.prompt.extra['n'] == int(sample.prompt.text[1:]))\n"
    )
    prompts = [
        Prompt(
            uid=f"u{n}",
            messages=({"role": "user", "content": f"p{n}"},),
            text=f"p{n}",
            answer=None,
            source="t",
            extra={"n": n},
        )
        for n in range(3)
    ]
    Batch(
        {
            "group": torch.arange(3).repeat_interleave(2),
            "response": [f"p{group}-{sample}" for group in range(3) for sample in range(2)],
            "finish_reason": ["stop"] * 6,
            "response_ids": Ragged.from_list([[1]] * 6, torch.int64),
        }
    ).save(tmp_path / "r")
    settings = config(reward__function=f"{tmp_path}/echo.py:score")
    cuts = [index * 6 // workers for index in range(workers + 1)]
    graded: list[list[object]] = []
    for start, stop in pairwise(cuts):
        grader = RewardWorker(to_json(settings))
        with grader.pool:
            graded += grader.grade(prompts, str(tmp_path / "r"), range(start, stop))[0]
    assert graded == [[{"score": 1.0}, None]] * 6


@pytest.mark.case("X04")
def test_a_rollout_that_was_cut_off_is_gone_on_with_after_its_last_whole_wave(char_llama: Path, tmp_path: Path) -> None:
    """Two samples a wave, the third of four waves is cut off, another worker goes on: two waves are drawn, to the bit
    what one worker draws."""
    settings = config(actor_rollout_ref__rollout__max_num_seqs=2, data__train_batch_size=4)
    params = replace(order().params, stop_ids=(1,))
    whole = RolloutOrder(
        prompt_ids=[[3, 4], [5, 6, 7], [8], [3]], uids=list("abcd"), epochs=[0] * 4, seeds=list(range(8)), params=params
    )
    unbroken = worker(char_llama, settings).rollout(whole, str(tmp_path / "unbroken"))
    lost, drawn = worker(char_llama, settings), []

    def dies(prompts: Any, *arguments: Any, **named: Any) -> Batch:
        if len(drawn) == 2:
            raise KeyboardInterrupt
        drawn.append(prompts)
        return generate(prompts, *arguments, **named)

    generate = lost.rollout_engine.generate
    lost.rollout_engine.generate = dies  # pyright: ignore[reportAttributeAccessIssue]
    out = tmp_path / ".rollout.1.tmp"
    with pytest.raises(KeyboardInterrupt):
        lost.rollout(whole, str(out))
    new = worker(char_llama, settings)
    generate = new.rollout_engine.generate
    drawn.clear()
    new.rollout_engine.generate = dies  # pyright: ignore[reportAttributeAccessIssue]
    metrics = new.rollout(whole, str(out))
    assert drawn == [[[8]], [[3]]]
    assert metrics["rollout/kept_samples"] == 4 and "rollout/kept_samples" not in unbroken
    assert folder_digest(out) == folder_digest(tmp_path / "unbroken")
    batch = Batch.load(out)
    assert list(zip(batch.rows("uid"), batch.rows("sample_index"), strict=True)) == [
        (uid, index) for uid in "abcd" for index in range(2)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".rollout.1.tmp", "unbroken"]
