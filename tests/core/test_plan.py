"""The batch plan: right numbers, every rule, suggestions that are legal, devices and memory."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonshift.core.config import load_config
from moonshift.core.config.schema import Config
from moonshift.core.errors import PlanError
from moonshift.core.plan import BatchPlan, ModelShape, make_plan
from moonshift.core.plan.memory import estimate
from moonshift.core.plan.mesh import places
from moonshift.core.plan.model_shape import read_shape, shape_of
from moonshift.core.plan.rules import RULES, faults
from moonshift.core.plan.sizes import KEYS, sizes_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
EXAMPLE = {
    "data.train_files": "sums:?max=99",
    "data.train_batch_size": 60,
    "data.max_prompt_length": 512,
    "data.max_response_length": 1024,
    "actor_rollout_ref.model.path": "builtin:char-llama",
    f"{ACTOR}.ppo_mini_batch_size": 60,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8,
    f"{ROLLOUT}.n": 12,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8,
    "trainer.n_gpus_per_node": 6,
}
"""60 prompts × 12 responses on 6 GPUs, replicas of 2."""
SHAPE = ModelShape(
    parameters=7_000_000_000,
    layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    attention_heads=28,
    kv_heads=4,
    head_dim=128,
    vocab_size=152064,
    max_positions=32768,
)


def config(**changes: Any) -> Config:
    """The example with keys changed; `__` stands for a dot."""
    given = EXAMPLE | {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(None, (), environ={}, code=given).config


def plan(**changes: Any) -> BatchPlan:
    return make_plan(config(**changes), 10_000)


def broken(**changes: Any) -> list[str]:
    return faults(sizes_of(config(**changes), 10_000, None))


def actor(name: str) -> str:
    return f"actor_rollout_ref__actor__{name}"


def rollout(name: str) -> str:
    return f"actor_rollout_ref__rollout__{name}"


def test_the_example_of_the_design_comes_out_exactly() -> None:
    found = plan()
    assert (found.rollout_replicas, found.prompts_per_replica, found.samples_per_replica) == (3, 20, 240)
    assert (found.samples_per_step, found.dp_size, found.samples_per_rank) == (720, 6, 120)
    assert found.actor.samples_per_rank_per_mini_batch == 120
    assert found.log_prob.micro_batches == found.actor.micro_batches_per_mini_batch == 15
    assert found.actor.optimizer_steps_per_step == 1 and found.on_policy


def test_more_gpus_change_two_keys_only() -> None:
    found = plan(trainer__nnodes=4, trainer__n_gpus_per_node=8, data__train_batch_size=64, **{
        actor("ppo_mini_batch_size"): 64, actor("ppo_micro_batch_size_per_gpu"): 8,
    })  # fmt: skip
    assert (found.world, found.rollout_replicas, found.prompts_per_replica, found.dp_size) == (32, 16, 4, 32)
    small = plan(data__train_batch_size=64, trainer__n_gpus_per_node=8, **{actor("ppo_mini_batch_size"): 64})
    assert found.samples_per_step == small.samples_per_step
    assert found.actor.samples_per_mini_batch == small.actor.samples_per_mini_batch


def test_sequence_parallelism_divides_the_ranks_and_not_the_batch() -> None:
    found = plan(**{actor("fsdp_config__ulysses_sequence_parallel_size"): 2})
    assert (found.dp_size, found.model_parallel, found.samples_per_rank) == (3, 2, 240)
    assert found.samples_per_step == 720 and found.actor.micro_batches_per_mini_batch == 30


def test_megatron_divides_by_tp_pp_and_cp() -> None:
    found = plan(trainer__n_gpus_per_node=8, trainer__nnodes=2, data__train_batch_size=64, **{
        actor("strategy"): "megatron",
        actor("megatron__tensor_model_parallel_size"): 2,
        actor("megatron__pipeline_model_parallel_size"): 2,
        actor("megatron__context_parallel_size"): 2,
        actor("ppo_mini_batch_size"): 32,
    })  # fmt: skip
    assert (found.dp_size, found.model_parallel) == (2, 8)
    assert found.actor.optimizer_steps_per_step == 2 and not found.on_policy
    assert found.actor.samples_per_rank_per_mini_batch == 32 * 12 // 2


def test_several_epochs_are_several_optimizer_steps() -> None:
    found = plan(trainer__total_training_steps=7, **{actor("ppo_mini_batch_size"): 20, actor("ppo_epochs"): 2})
    assert found.actor.optimizer_steps_per_step == 6 and found.optimizer_steps == 42


def test_a_token_budget_counts_passes_at_their_most() -> None:
    found = plan(**{actor("use_dynamic_bsz"): True, actor("ppo_max_token_len_per_gpu"): 4096})
    assert found.actor.max_tokens == found.log_prob.max_tokens == 4096
    assert found.actor.micro_batches_per_mini_batch == 60  # two samples of 1,536 tokens fit 4,096
    shared = {actor("fsdp_config__ulysses_sequence_parallel_size"): 2}
    assert (
        plan(**{actor("use_dynamic_bsz"): True, actor("ppo_max_token_len_per_gpu"): 4096}, **shared).actor.max_tokens
        == 8192
    )


def test_a_critic_has_sizes_of_its_own() -> None:
    found = plan(
        algorithm__adv_estimator="gae", critic__ppo_mini_batch_size=30, critic__ppo_micro_batch_size_per_gpu=20
    )
    assert found.critic is not None
    assert (found.critic.samples_per_rank_per_mini_batch, found.critic.micro_batches_per_mini_batch) == (60, 3)
    assert found.critic.optimizer_steps_per_step == 2
    assert plan().critic is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer__n_gpus_per_node": 7}, ["7 GPUs in replicas of 2", "n_gpus_per_node=6 or 8"]),
        ({actor("fsdp_config__ulysses_sequence_parallel_size"): 4}, ["6 GPUs in groups of 4", "sequence parallel 4"]),
        ({actor("ppo_mini_batch_size"): 24}, ["60 prompts a step", "24 prompts an optimizer step", "=20 or 60"]),
        ({actor("ppo_mini_batch_size"): 120}, ["60 prompts a step", "120 prompts an optimizer step", "=60"]),
        ({actor("ppo_micro_batch_size_per_gpu"): 7}, ["120 samples", "passes of 7", "=6 or 8"]),
        ({actor("ppo_micro_batch_size_per_gpu"): 121}, ["121 samples a pass", "120 samples a rank"]),
        ({rollout("n"): 1}, ["needs at least 2", "1 a prompt"]),
        ({rollout("n"): 5, actor("ppo_mini_batch_size"): 20}, ["20 prompts × 5 responses = 100 samples over 6 ranks"]),
        ({"data__train_batch_size": 12_000}, ["12000 prompts a step", "10000", "=9960"]),
        ({rollout("max_model_len"): 1024}, ["512 + 1024 = 1536 tokens, context 1024"]),
        ({rollout("log_prob_use_dynamic_bsz"): True}, ["on-policy", "log_prob_use_dynamic_bsz=True"]),
        ({rollout("expert_parallel_size"): 4}, ["4 is not 2 × 1", "=2"]),
        ({actor("megatron__tensor_model_parallel_size"): 2}, ["Megatron's", "strategy=fsdp2"]),
        (
            {actor("strategy"): "megatron", actor("fsdp_config__ulysses_sequence_parallel_size"): 2},
            ["belongs to FSDP", "=1"],
        ),
        (
            {"trainer__nnodes": 2, "trainer__n_gpus_per_node": 3},
            ["lie within one node", "2 GPUs a replica, 3 a node"],
        ),
        (
            {actor("use_dynamic_bsz"): True, actor("ppo_max_token_len_per_gpu"): 1000},
            ["longest sample", "512 + 1024 = 1536 tokens, budget 1000 × 1", "=1536"],
        ),
        (
            {"algorithm__adv_estimator": "gae", "critic__ppo_mini_batch_size": 50},
            ["critic mini-batches", "50 prompts"],
        ),
    ],
)  # fmt: skip
def test_each_rule_is_named_in_words_and_numbers(changes: dict[str, Any], words: list[str]) -> None:
    found = "\n".join(broken(**changes))
    for word in words:
        assert word in found


@pytest.mark.case("B03")
@pytest.mark.parametrize("micro", [8, 3])
def test_a_micro_batch_that_does_not_fit_the_mini_batch_is_refused(micro: int) -> None:
    one = {"trainer__n_gpus_per_node": 1, rollout("tensor_model_parallel_size"): 1, rollout("n"): 2}
    with pytest.raises(PlanError, match=f"{micro}"):
        plan(
            data__train_batch_size=2,
            **one,
            **{actor("ppo_mini_batch_size"): 2, actor("ppo_micro_batch_size_per_gpu"): micro},
        )
    assert plan(
        data__train_batch_size=2, **one,
        **{actor("ppo_mini_batch_size"): 2, actor("ppo_micro_batch_size_per_gpu"): micro},
        **{actor("use_dynamic_bsz"): True},
    ).actor.max_tokens  # fmt: skip


@pytest.mark.case("B04")
def test_a_mini_batch_smaller_than_the_ranks_is_refused_at_once() -> None:
    with pytest.raises(PlanError, match="samples over 4 ranks"):
        plan(
            data__train_batch_size=3, trainer__n_gpus_per_node=4, **{actor("ppo_mini_batch_size"): 3, rollout("n"): 2},
        )  # fmt: skip


@pytest.mark.case("D08")
def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(PlanError, match=r"1024 prompts a step.* holds 128"):
        make_plan(config(data__train_batch_size=1024, **{actor("ppo_mini_batch_size"): 1024}), 128)


def test_all_failures_come_at_once() -> None:
    found = broken(trainer__n_gpus_per_node=7, **{actor("ppo_mini_batch_size"): 24, rollout("max_model_len"): 100})
    assert len(found) >= 4


@pytest.mark.parametrize("given", range(1, 61, 7))
@pytest.mark.parametrize("gpus", [3, 6, 8])
def test_what_is_suggested_for_one_broken_rule_is_legal(given: int, gpus: int) -> None:
    """Where one key alone mends everything, taking the suggestion leaves no fault on that key."""
    sizes = replace(sizes_of(config(), 10_000, None), mini=given, gpus_per_node=gpus, rollout_tp=1)
    for fault in faults(sizes):
        for option in fault.rpartition("Nearest legal: ")[2].rstrip(".").split(f"{KEYS['mini']}=")[1:]:
            for word in option.split():
                if word.isdigit():
                    mended = replace(sizes, mini=int(word))
                    broken_rules = [rule for rule in RULES if rule.applies(mended) and not rule.holds(mended)]
                    assert not [rule for rule in broken_rules if rule.keys[:1] == ("mini",)]
                else:
                    break


def test_a_model_that_is_known_has_rules_of_its_own() -> None:
    sizes = sizes_of(config(data__max_response_length=40_000), None, SHAPE)
    assert any("512 + 40000 = 40512 tokens, the model has 32768" in fault for fault in faults(sizes))
    sizes = replace(sizes_of(config(), None, SHAPE), rollout_tp=3)
    assert any("28 heads over 3 GPUs of a replica" in fault for fault in faults(sizes))


def test_every_gpu_has_its_replica_and_shard_group() -> None:
    mesh = places(config(), plan())
    assert [(place.replica, place.replica_rank) for place in mesh] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [place.dp for place in mesh] == [0, 1, 2, 3, 4, 5]
    changes = {
        "trainer__n_gpus_per_node": 8,
        "data__train_batch_size": 64,
        actor("strategy"): "megatron",
        actor("megatron__tensor_model_parallel_size"): 2,
        actor("megatron__pipeline_model_parallel_size"): 2,
        actor("ppo_mini_batch_size"): 64,
    }
    mesh = places(config(**changes), plan(**changes))
    assert [dict(place.parts)["tp"] for place in mesh] == [0, 1] * 4
    assert [place.dp for place in mesh] == [0, 0, 1, 1] * 2
    assert [dict(place.parts)["pp"] for place in mesh] == [0] * 4 + [1] * 4
    assert len({(place.dp, place.parts) for place in mesh}) == 8


def test_memory_shrinks_with_gpus_and_grows_with_micro_batches() -> None:
    one = {"trainer__n_gpus_per_node": 1, rollout("tensor_model_parallel_size"): 1}
    few, many = (estimate(config(**given), plan(**given), SHAPE) for given in (one, {}))
    assert few.parts["optimizer"] == 8 * SHAPE.parameters
    assert many.parts["weights"] == -(-SHAPE.parameters // 6) * 4
    bigger = {actor("ppo_micro_batch_size_per_gpu"): 24}
    assert estimate(config(**bigger), plan(**bigger), SHAPE).parts["logits"] == 3 * many.parts["logits"]
    assert "7,000,000,000 parameters" in many.assumed[0]


def test_a_models_shape_is_read_without_loading_it(char_llama: Path) -> None:
    shape = read_shape(char_llama)
    assert shape is not None
    from moonshift.core.training.model import load_model

    assert shape.parameters == sum(tensor.numel() for tensor in load_model(char_llama, device="cpu").parameters())
    import json

    settings = json.loads((char_llama / "config.json").read_text())
    computed = shape_of(settings)
    assert computed is not None and computed.parameters == shape.parameters
    assert shape_of({"hidden_size": 3}) is None


def test_a_plan_needs_no_heavy_library() -> None:
    code = (
        "import sys, moonshift.core.plan, moonshift.flows.plan_view;"
        "heavy = {'torch', 'transformers', 'ray', 'prefect', 'mlflow', 'pyarrow'};"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"
