"""PPO, ReMax and DAPO's dynamic sampling through the same flow, on real parts, and through a kill."""

import signal
from pathlib import Path
from typing import Any

import pytest

from .conftest import resume_and_compare, rows, start, train, wait_for_stage

pytestmark = pytest.mark.slow
PPO = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=1000",
    "trainer.critic_warmup=1",
    "critic.optim.lr=1e-3",
)
DAPO = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.max_num_gen_batches=3",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "reward.overlong_buffer.enable=true",
    "reward.overlong_buffer.len=1",
    "reward.overlong_buffer.penalty_factor=0.1",
    "warm_start.steps=60",
)
REMAX = ("algorithm.adv_estimator=remax", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo")


def metric(home: Path, key: str) -> list[float]:
    return [value for (value,) in rows(home, f"select value from metrics_outbox where key = '{key}' order by step")]


def test_ppo_trains_a_critic_and_adapts_its_kl(server_home: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    done, summary = train(home, server_home, *PPO)
    assert done.returncode == 0, done.stderr
    assert summary["state"] == "COMPLETED" and summary["optimizer_steps"] == 8  # the critic alone in the first step
    assert len(metric(home, "critic/vf_loss")) == 5 and len(metric(home, "actor/pg_loss")) == 4
    weights = metric(home, "actor/reward_kl_penalty_coeff")
    assert weights[0] == 0.001 and len(set(weights)) == 5
    assert (Path(summary["checkpoint"]) / "critic" / "value_head.safetensors").is_file()


def test_remax_grades_a_greedy_response_to_each_prompt(server_home: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    done, summary = train(home, server_home, *REMAX)
    assert done.returncode == 0, done.stderr
    assert summary["state"] == "COMPLETED"
    greedy = home / "runs" / summary["run_id"] / "stages" / "step-0003" / "score" / "baseline"
    assert greedy.is_dir()


@pytest.fixture(scope="module")
def sampled(server_home: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    home = tmp_path_factory.mktemp("dapo") / "home"
    done, summary = train(home, server_home, *DAPO)
    assert done.returncode == 0, done.stderr
    return home, summary


def test_dynamic_sampling_draws_again_and_counts_every_group(sampled: tuple[Path, Any]) -> None:
    home, summary = sampled
    assert summary["state"] == "COMPLETED"
    kept, dropped, carried_in, carried_out, trained, refills = (
        metric(home, f"training/filter_groups/{name}")
        for name in ("kept", "dropped", "carried_in", "carried_out", "trained", "refills")
    )
    position = metric(home, "training/data_position")
    assert sum(kept) + sum(dropped) == position[-1]  # every prompt that was drawn is in one of the two
    assert carried_in == [0.0, *carried_out[:-1]]
    assert all(kept[i] + carried_in[i] >= trained[i] for i in range(5)) and max(refills) >= 1
    drawn = rows(home, "select count(distinct uid || epoch) from samples")[0][0]
    assert drawn == position[-1]


def test_a_killed_run_draws_the_same_prompts(
    sampled: tuple[Path, Any], server_home: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    process = start(home, server_home, *DAPO)
    wait_for_stage(home, "step-0003/rollout", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resume_and_compare(home, server_home, sampled, *DAPO)
