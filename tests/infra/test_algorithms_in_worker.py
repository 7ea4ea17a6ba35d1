"""Every estimator and loss trains through the worker's own stages, and a critic's state comes back bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moonshift.core.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from moonshift.core.batch import Batch
from moonshift.core.config import load_config, to_json
from moonshift.core.config.schema import Config
from moonshift.core.plan import make_plan
from moonshift.core.training.advantages import Stages
from moonshift.core.training.engine import TorchTrainEngine
from moonshift.core.types import SamplingParams
from moonshift.infra.workers.model import ModelWorker
from moonshift.infra.workers.orders import RolloutOrder
from moonshift.infra.workers.reward import write_scores

ONE = {
    "data.train_files": "sums:?max=9",
    "data.train_batch_size": 2,
    "data.max_response_length": 4,
    "actor_rollout_ref.model.path": "builtin:char-llama",
    "actor_rollout_ref.rollout.n": 3,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 3,
    "actor_rollout_ref.actor.optim.lr": 1e-2,
    "critic.optim.lr": 1e-2,
    "trainer.total_training_steps": 5,
    "trainer.device": "cpu",
    "trainer.num_threads": 1,
}
SCORES = [1.0, 0.0, 0.5, 0.0, 0.0, 1.0]


def config(**changes: Any) -> Config:
    given = ONE | {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(None, (), environ={}, code=given).config


def worker(model: Path, settings: Config, checkpoint: Path | None = None) -> ModelWorker:
    made = ModelWorker(to_json(settings), make_plan(settings, 100))
    made.load(str(model), None if checkpoint is None else str(checkpoint))
    return made


def order(n: int = 3, temperature: float = 1.0, first_seed: int = 0) -> RolloutOrder:
    params = SamplingParams(n=n, temperature=temperature, top_p=1.0, top_k=-1, max_new_tokens=4, stop_ids=(1,))
    seeds = list(range(first_seed, first_seed + 2 * n))
    return RolloutOrder(prompt_ids=[[3, 4], [5, 6, 7]], uids=["a", "b"], epochs=[0, 0], seeds=seeds, params=params)


def step(made: ModelWorker, folder: Path, number: int = 1) -> dict[str, float]:
    """All stages of one training step; returns the metrics of advantage and update."""
    stages = Stages(rollout=str(folder / "r"), score=str(folder / "s"), log_probs=str(folder / "l"))
    made.rollout(order(first_seed=number), stages.rollout)
    made.rollout(order(n=1, temperature=0.0), f"{stages.rollout}/baseline")
    write_scores({"score": SCORES, "form": SCORES[::-1]}, Path(stages.score))
    write_scores({"score": [0.25, 0.75]}, Path(stages.score) / "baseline")
    made.log_probs(stages.rollout, stages.log_probs)
    metrics = made.advantage(stages, str(folder / "a"), None)
    metrics |= made.update(str(folder / "a"), number)
    measured = ("memory/", "perf/cpu_memory", "perf/max_memory")  # of this machine at this moment
    return {name: value for name, value in metrics.items() if not name.startswith(measured)}


def weights(made: ModelWorker) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for _, tensor in made.train_engine.weights()])


@pytest.mark.parametrize("estimator", sorted(ADVANTAGE_ESTIMATORS))
def test_every_estimator_trains(char_llama: Path, tmp_path: Path, estimator: str) -> None:
    made = worker(char_llama, config(algorithm__adv_estimator=estimator))
    before = weights(made).clone()
    metrics = step(made, tmp_path)
    assert not torch.equal(weights(made), before)
    assert metrics["training/optimizer_steps"] == 2
    assert {"critic/advantages/mean", "critic/score/mean", "actor/pg_loss", "rollout_corr/kl"} <= metrics.keys()
    assert ("critic/vf_loss" in metrics) == (estimator == "gae")


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_every_loss_trains_and_does_not_depend_on_the_cut(char_llama: Path, tmp_path: Path, loss: str) -> None:
    ended = []
    for size in (6, 2):
        settings = config(
            actor_rollout_ref__actor__policy_loss__loss_mode=loss,
            actor_rollout_ref__actor__policy_loss__clip_cov_ratio=0.2,
            actor_rollout_ref__actor__policy_loss__clip_cov_lb=0.0,
            actor_rollout_ref__actor__policy_loss__clip_cov_ub=10.0,
            actor_rollout_ref__actor__policy_loss__kl_cov_ratio=0.2,
            actor_rollout_ref__actor__ppo_mini_batch_size=2,
            actor_rollout_ref__actor__ppo_epochs=2,
            actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=size,
        )
        made = worker(char_llama, settings)
        before = weights(made).clone()
        metrics = step(made, tmp_path / str(size))
        assert not torch.equal(weights(made), before)
        ended.append((weights(made), metrics["actor/pg_loss"]))
    torch.testing.assert_close(ended[0][0], ended[1][0], atol=5e-4, rtol=0)
    assert ended[0][1] == pytest.approx(ended[1][1], abs=1e-4)


def test_clip_ratios_that_are_not_given_are_the_losses_own(char_llama: Path) -> None:
    from moonshift.core.training.engine import policy_loss_options

    options = POLICY_LOSSES["gspo"].options
    assert policy_loss_options(config(), options) == {}
    given = policy_loss_options(config(actor_rollout_ref__actor__clip_ratio=0.3), options)
    assert given == {"clip_ratio_low": 0.3, "clip_ratio_high": 0.3}


@pytest.mark.parametrize("bypass", [False, True])
def test_rollouts_are_corrected_with_three_policies_and_with_two(
    char_llama: Path, tmp_path: Path, bypass: bool
) -> None:
    rule = {
        "algorithm__rollout_correction__bypass_mode": bypass,
        "algorithm__rollout_correction__rollout_is": "token",
        "algorithm__rollout_correction__rollout_rs": "token_k2",
        "algorithm__rollout_correction__rollout_rs_threshold": "0.5",
        "actor_rollout_ref__actor__policy_loss__loss_mode": "reinforce",
    }
    made = worker(char_llama, config(**rule))
    metrics = step(made, tmp_path)
    redo = Batch.load(tmp_path / "a")
    assert ("weights" in redo.names) != bypass
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=0.2)
    # the second mini-batch meets a policy that one optimizer step has moved: with two policies the gap is seen
    assert (metrics["rollout_corr/k3_kl"] > 1e-6) == bypass


def test_a_rejected_token_has_no_gradient_and_stays_in_the_count(char_llama: Path, tmp_path: Path) -> None:
    settings = config(
        algorithm__rollout_correction__rollout_rs="token_k2", algorithm__rollout_correction__rollout_rs_threshold="0.1"
    )
    made = worker(char_llama, settings)
    stages = Stages(rollout=str(tmp_path / "r"), score=str(tmp_path / "s"), log_probs=str(tmp_path / "l"))
    made.rollout(order(), stages.rollout)
    rollouts = Batch.load(tmp_path / "r")
    shifted = rollouts.ragged("rollout_log_probs")
    values = shifted.values.clone()
    values[0] -= 3.0
    rollouts.with_columns({"rollout_log_probs": type(shifted)(values, shifted.offsets)}).save(tmp_path / "shifted")
    write_scores({"score": SCORES}, Path(stages.score))
    made.log_probs(str(tmp_path / "shifted"), stages.log_probs)
    stages = Stages(rollout=str(tmp_path / "shifted"), score=stages.score, log_probs=stages.log_probs)
    metrics = made.advantage(stages, str(tmp_path / "a"), None)
    redo = Batch.load(tmp_path / "a")
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / len(values))
    assert float(redo.ragged("weights").values[0]) == 0.0 and bool(redo.ragged("loss_mask").values[0])
    kept = config(
        algorithm__rollout_correction__rollout_rs="token_k2",
        algorithm__rollout_correction__rollout_rs_threshold="0.1",
        algorithm__rollout_correction__denominator="kept",
    )
    worker(char_llama, kept).advantage(stages, str(tmp_path / "b"), None)
    assert not bool(Batch.load(tmp_path / "b").ragged("loss_mask").values[0])


def test_the_critic_learns_alone_while_it_warms_up(char_llama: Path, tmp_path: Path) -> None:
    made = worker(char_llama, config(algorithm__adv_estimator="gae", trainer__critic_warmup=1))
    before = weights(made).clone()
    metrics = step(made, tmp_path / "1", 1)
    assert torch.equal(weights(made), before) and metrics["training/optimizer_steps"] == 0
    assert made.critic is not None and made.critic.optimizer_steps == 2
    metrics = step(made, tmp_path / "2", 2)
    assert not torch.equal(weights(made), before) and metrics["training/optimizer_steps"] == 2
    assert make_plan(made.config, 100).optimizer_steps == 8


def test_a_critic_learns_the_returns(char_llama: Path, tmp_path: Path) -> None:
    made = worker(char_llama, config(algorithm__adv_estimator="gae", critic__cliprange_value=10.0))
    step(made, tmp_path)
    assert made.critic is not None
    batch = Batch.load(tmp_path / "a")
    losses = []
    for number in range(2, 42):
        batch = batch.with_columns({"values": made.critic.values(batch)})
        losses.append(made.critic.update(batch, number)["critic/vf_loss"])
    assert losses[-1] < 0.2 * losses[0]


def test_a_saved_worker_goes_on_bit_by_bit(char_llama: Path, tmp_path: Path) -> None:
    settings = config(algorithm__adv_estimator="gae")
    unbroken = worker(char_llama, settings)
    step(unbroken, tmp_path / "1", 1)
    unbroken.save(str(tmp_path / "checkpoint"))
    resumed = worker(char_llama, settings, tmp_path / "checkpoint")
    first, second = (step(made, tmp_path / name, 2) for name, made in (("u", unbroken), ("r", resumed)))
    assert first == second
    assert unbroken.weights_sha256() == resumed.weights_sha256()
    assert unbroken.critic is not None and resumed.critic is not None
    for (name, left), (_, right) in zip(unbroken.critic.weights(), resumed.critic.weights(), strict=True):
        assert torch.equal(left, right), name
    states = [made.critic.optimizer.state() for made in (unbroken, resumed) if made.critic is not None]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_overlong_penalty_is_taken_from_the_score(char_llama: Path, tmp_path: Path) -> None:
    settings = config(reward__overlong_buffer__enable=True, reward__overlong_buffer__len=3)
    metrics = step(worker(char_llama, settings), tmp_path)
    plain = step(worker(char_llama, config()), tmp_path / "plain")
    expected = plain["critic/rewards/mean"] + metrics["reward/overlong_penalty/mean"]
    assert metrics["critic/rewards/mean"] == pytest.approx(expected)
    assert metrics["critic/score/mean"] == plain["critic/score/mean"]
    assert -1.0 <= metrics["reward/overlong_penalty/mean"] < 0


def test_the_engine_is_the_one_that_is_tested(char_llama: Path) -> None:
    assert type(worker(char_llama, config()).train_engine) is TorchTrainEngine
