"""One, two and four processes train alike: the same samples, losses, weights and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moonshift.core.batch import Batch, Ragged

from ..training_ranks import Spec, run

pytestmark = pytest.mark.slow
TENSORS = ("model/model.safetensors", "optimizer.safetensors")
CRITIC = ("critic/model.safetensors", "critic/value_head.safetensors", "critic_optimizer.safetensors")
ACTOR = "actor_rollout_ref.actor"
GRPO = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.entropy_coeff": 0.01, "actor_rollout_ref.rollout.max_num_seqs": 8}
PPO = {"algorithm.adv_estimator": "gae", f"{ACTOR}.ppo_epochs": 2, "actor_rollout_ref.rollout.max_num_seqs": 4}
BY_TOKENS = {
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 22,
    f"{ACTOR}.ppo_mini_batch_size": 4,
    "actor_rollout_ref.rollout.n": 4,
}
"""one optimizer step from passes of unequal size, whose number no number of ranks divides"""

BFLOAT16 = {f"{ACTOR}.fsdp_config.dtype": "bfloat16", "actor_rollout_ref.model.enable_gradient_checkpointing": True}
LORA = {
    "actor_rollout_ref.model.lora_rank": 4,
    f"{ACTOR}.optim.lr": 1e-2,
    f"{ACTOR}.use_kl_loss": True,
    "actor_rollout_ref.rollout.max_num_seqs": 8,
}
MUON = GRPO | {f"{ACTOR}.optim.optimizer": "Muon"}
OFFLOAD = {
    f"{ACTOR}.fsdp_config.param_offload": True,
    "critic.fsdp.optimizer_offload": True,
    "actor_rollout_ref.ref.fsdp_config.param_offload": True,
}
ADAPTER = ("adapter/adapter_model.safetensors",)


def close(found: float, expected: float) -> bool:
    return found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def tensors(saved: Path, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {f"{name}/{key}": value for name in names for key, value in load_file(saved / name).items()}


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.fixture(
    scope="module", params=[GRPO, PPO, BY_TOKENS, BFLOAT16, MUON], ids=["grpo", "ppo", "by-tokens", "bf16", "muon"]
)
def alone(
    request: pytest.FixtureRequest, char_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], list[dict[str, float]]]:
    """Two steps by one process: folder, settings and metrics."""
    folder = tmp_path_factory.mktemp("alone")
    spec = Spec(world=1, model=str(char_llama), folder=str(folder), steps=[1, 2], settings=request.param)
    return folder, request.param, run(spec)


@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_train_as_one_does(
    alone: tuple[Path, dict[str, Any], list[dict[str, float]]], char_llama: Path, tmp_path: Path, world: int
) -> None:
    single, settings, expected = alone
    spec = Spec(world=world, model=str(char_llama), folder=str(tmp_path), steps=[1, 2], settings=settings)
    found = run(spec)
    for stage in ("rollout", "score", "log_probs"):
        left, right = Batch.load(single / "1" / stage), Batch.load(tmp_path / "1" / stage)
        if stage == "rollout" and settings.get("actor_rollout_ref.rollout.max_num_seqs", 1024) * world > 16:
            rounded = [batch.ragged("rollout_log_probs").values for batch in (left, right)]
            torch.testing.assert_close(rounded[1], rounded[0], atol=1e-6, rtol=0)  # its one wave was split
            left, right = left.pop(["rollout_log_probs"])[1], right.pop(["rollout_log_probs"])[1]
        assert left.equals(right), stage  # to the last bit
    for before, after in zip(expected, found, strict=True):
        assert before.keys() == after.keys()
        measured = ("perf/", "memory/", "rollout_corr/", "training/rollout_probs")
        compared = {key for key in before if not key.startswith(measured) or key.startswith("perf/tflop")}
        assert compared >= {"perf/tflop/actor", "perf/tflop_unshared/actor"}
        assert {key: (after[key], before[key]) for key in compared if not close(after[key], before[key])} == {}
    names = TENSORS + (CRITIC if "algorithm.adv_estimator" in settings else ())
    saved = [tensors(folder / "2" / "saved", names) for folder in (single, tmp_path)]
    assert saved[0].keys() == saved[1].keys()
    for name, tensor in saved[0].items():
        torch.testing.assert_close(
            saved[1][name], tensor, atol=1e-5, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_a_checkpoint_is_the_same_at_any_number_of_processes(char_llama: Path, tmp_path: Path) -> None:
    """R12: written by one or by two, read by 1, 2 and 4: equal bits; and the next losses agree."""
    first = [
        Spec(world=n, model=str(char_llama), folder=str(tmp_path / f"w{n}"), steps=[1], settings=PPO) for n in (1, 2)
    ]
    for spec in first:
        run(spec)
    files = sorted(path.relative_to(tmp_path / "w1") for path in (tmp_path / "w1" / "1" / "saved").rglob("*"))
    assert files == sorted(path.relative_to(tmp_path / "w2") for path in (tmp_path / "w2" / "1" / "saved").rglob("*"))
    losses: list[tuple[float, float]] = []
    for writer, reader in ((1, 2), (2, 1), (2, 4)):
        saved, folder = tmp_path / f"w{writer}" / "1" / "saved", tmp_path / f"{writer}-{reader}"
        spec = Spec(
            world=reader, model=str(char_llama), folder=str(folder), steps=[2], settings=PPO,
            checkpoint=str(saved), redo=str(tmp_path / "w1" / "1" / "advantage"),
        )  # fmt: skip
        (metrics,) = run(spec)
        assert_same_bits(tensors(folder / "0" / "saved", TENSORS + CRITIC), tensors(saved, TENSORS + CRITIC))
        losses.append((metrics["actor/loss"], metrics["critic/vf_loss"]))
    assert all(close(a, b) for found in losses[1:] for a, b in zip(found, losses[0], strict=True)), losses


def test_ranks_with_weights_and_state_on_the_host_train_as_one_without(char_llama: Path, tmp_path: Path) -> None:
    """PPO with a reference: two steps by one process; by two, offloaded; the second again, one from the other's."""
    settings = PPO | MUON | {"critic.optim.optimizer": "Muon", f"{ACTOR}.ppo_epochs": 1}
    names = TENSORS + CRITIC
    plain = Spec(world=1, model=str(char_llama), folder=str(tmp_path / "1"), steps=[1, 2], settings=settings)
    expected = run(plain)
    saved = tensors(tmp_path / "1" / "2" / "saved", names)
    assert any(name.endswith(".momentum_buffer") for name in saved)
    for world in (1, 2):
        folder = tmp_path / f"offloaded-{world}"
        spec = Spec(world=world, model=str(char_llama), folder=str(folder), steps=[1, 2], settings=settings | OFFLOAD)
        for before, after in zip(expected, run(spec), strict=True):
            for key in ("actor/loss", "actor/kl_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"):
                assert close(after[key], before[key]), key
        torch.testing.assert_close(tensors(folder / "2" / "saved", names), saved, atol=1e-5, rtol=1e-5)
        again = Spec(
            world=1, model=str(char_llama), folder=str(folder / "again"), steps=[2], settings=settings,
            checkpoint=str(folder / "1" / "saved"), redo=str(folder / "2" / "advantage"),
        )  # fmt: skip
        run(again)
        ended = (tensors(place / "2" / "saved", names) for place in (folder / "again", folder))
        torch.testing.assert_close(*ended, atol=1e-5, rtol=1e-5)


MUON_OFFLOADED = {f"{ACTOR}.optim.optimizer": "Muon", f"{ACTOR}.fsdp_config.param_offload": True}


@pytest.mark.parametrize("extra", [{}, BFLOAT16, MUON_OFFLOADED], ids=["float32", "bf16", "muon-offloaded"])
def test_an_adapter_is_trained_and_resumed_alike_by_one_and_by_two(
    char_llama: Path, tmp_path: Path, extra: dict[str, Any]
) -> None:
    """Two steps by one process; step 1 by two, from its redo log; step 2 again by either, from its checkpoint."""
    settings = LORA | extra
    names = TENSORS + ADAPTER
    first = Spec(world=1, model=str(char_llama), folder=str(tmp_path / "1"), steps=[1, 2], settings=settings)
    expected = run(first)
    assert expected[1]["actor/kl_loss"] > 0  # the reference is the base, not the adapter
    redo = str(tmp_path / "1" / "1" / "advantage")
    one = tensors(tmp_path / "1" / "1" / "saved", names)
    folder = tmp_path / "redo"
    run(Spec(world=2, model=str(char_llama), folder=str(folder), steps=[1], settings=settings, redo=redo))
    two = tensors(folder / "1" / "saved", names)
    assert one.keys() == two.keys()
    torch.testing.assert_close(two, one, atol=1e-5, rtol=1e-5)
    for world in (1, 2):
        folder = tmp_path / f"resumed-{world}"
        spec = Spec(
            world=world, model=str(char_llama), folder=str(folder), steps=[2], settings=settings,
            checkpoint=str(tmp_path / "1" / "1" / "saved"), redo=str(tmp_path / "1" / "2" / "advantage"),
        )  # fmt: skip
        run(spec)
        assert_same_bits(tensors(folder / "0" / "saved", names), one)
        ended = (tensors(place / "2" / "saved", names) for place in (folder, tmp_path / "1"))
        if world == 1:
            assert_same_bits(*ended)
        else:
            torch.testing.assert_close(*ended, atol=1e-5, rtol=1e-5)


def test_the_model_of_an_adapter_checkpoint_is_a_folder_like_any_other(char_llama: Path, tmp_path: Path) -> None:
    run(Spec(world=1, model=str(char_llama), folder=str(tmp_path), steps=[1], settings=LORA))
    saved = tmp_path / "1" / "saved" / "model"
    plain = AutoModelForCausalLM.from_pretrained(saved)
    assert load_file(saved / "model.safetensors").keys() == load_file(char_llama / "model.safetensors").keys()
    base = AutoModelForCausalLM.from_pretrained(char_llama)
    theirs = PeftModel.from_pretrained(base, tmp_path / "1" / "saved" / "adapter")
    ids = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(plain(ids).logits, theirs(ids).logits, atol=1e-5, rtol=0)
    again = Spec(world=1, model=str(saved), folder=str(tmp_path / "again"), steps=[1])
    assert run(again)[0]["training/optimizer_steps"] == 2  # trains on, whole


@pytest.mark.case("X01")
def test_a_rank_without_samples_neither_hangs_the_others_nor_changes_the_gradient(
    char_llama: Path, tmp_path: Path
) -> None:
    """Two samples, one pass: one rank makes it, the other one that counts for nothing."""
    ids = Ragged.from_list([[3, 4, 5], [6, 7]], torch.int64)
    batch = Batch(
        {
            "prompt_ids": Ragged.from_list([[3], [4, 5]], torch.int64),
            "response_ids": ids,
            "loss_mask": Ragged(torch.ones(5, dtype=torch.bool), ids.offsets),
            "advantages": Ragged.from_list([[1.0, -0.5, 2.0], [0.5, -1.0]], torch.float32),
            "rollout_log_probs": Ragged.from_list([[-1.0, -2.0, -3.0], [-1.5, -2.5]], torch.float32),
        }
    )
    batch.save(tmp_path / "redo")
    settings = {f"{ACTOR}.ppo_mini_batch_size": 4}
    found: list[tuple[dict[str, float], dict[str, torch.Tensor]]] = []
    for world in (1, 2):
        folder = tmp_path / str(world)
        spec = Spec(
            world=world, model=str(char_llama), folder=str(folder), steps=[1], settings=settings,
            redo=str(tmp_path / "redo"),
        )  # fmt: skip
        found.append((run(spec)[0], tensors(folder / "1" / "saved", TENSORS)))
    (expected, one), (metrics, two) = found
    assert metrics["training/optimizer_steps"] == 1
    of_processes = ("memory/", "perf/")
    expected = {key: value for key, value in expected.items() if not key.startswith(of_processes)}
    assert {key: (metrics[key], value) for key, value in expected.items() if not close(metrics[key], value)} == {}
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-6, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_numbers_that_one_rank_refuses_skip_the_step_on_all(char_llama: Path, tmp_path: Path) -> None:
    """The NaN is in one sample, so in one rank's pass: no rank hangs, and no weight moves."""
    ids = Ragged.from_list([[3, 4]] * 4, torch.int64)
    advantages = torch.tensor([1.0, -1.0, 1.0, torch.nan, 1.0, -1.0, 0.5, 0.5])
    batch = Batch(
        {
            "prompt_ids": ids,
            "response_ids": ids,
            "loss_mask": Ragged(torch.ones(8, dtype=torch.bool), ids.offsets),
            "advantages": Ragged(advantages, ids.offsets),
            "rollout_log_probs": Ragged(torch.full((8,), -1.0), ids.offsets),
        }
    )
    batch.save(tmp_path / "redo")
    settings = {f"{ACTOR}.ppo_mini_batch_size": 4}
    spec = Spec(
        world=2, model=str(char_llama), folder=str(tmp_path / "2"), steps=[1], settings=settings,
        redo=str(tmp_path / "redo"),
    )  # fmt: skip
    (metrics,) = run(spec)
    assert metrics["actor/skipped_updates"] == 1 and metrics["training/optimizer_steps"] == 0
    assert_same_bits(*(tensors(tmp_path / "2" / step / "saved", TENSORS[:1]) for step in ("0", "1")))
