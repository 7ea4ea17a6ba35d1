"""Weights and optimizer state in host memory: the same numbers, and what a GPU has free again."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moonshift.core.batch import Batch
from moonshift.core.plan import ModelShape
from moonshift.core.plan.memory import Memory, estimate
from moonshift.core.training.critic import CriticEngine, load_critic
from moonshift.core.training.engine import TorchTrainEngine
from moonshift.core.training.log_probs import TokenScorer
from moonshift.core.training.model import load_model, resolve_model
from moonshift.core.training.parallel import device_of, gathered_state, shard
from moonshift.infra.workers.process_group import alone

from .test_engine import batch, engine, planned, weights  # noqa: F401 (batch is a fixture)

CPU = torch.device("cpu")
FSDP = "actor_rollout_ref.actor.fsdp_config"
PARAMS, STATE = f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"
OPTIMIZERS = ["AdamW", "Muon"]


def named(optimizer: str) -> str:
    return f"actor_rollout_ref.actor.optim.optimizer={optimizer}"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    yield alone(CPU)
    dist.destroy_process_group()


def sharded(model: Path, tmp_path: Path, mesh: DeviceMesh, *overrides: str) -> TorchTrainEngine:
    config, plan = planned(tmp_path, *overrides)
    scorer = TokenScorer(load_model(model, device=torch.device(mesh.device_type)))
    shard(scorer, mesh, offload=config.actor_rollout_ref.actor.fsdp_config.param_offload)
    return TorchTrainEngine(scorer, config, plan, vocab_limit=14)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_offloaded_weights_end_with_the_same_bits(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    mesh: DeviceMesh,
    optimizer: str,
    clip: float,
) -> None:
    settings = (named(optimizer), f"actor_rollout_ref.actor.grad_clip={clip}")
    plain, moved = (sharded(char_llama, tmp_path, mesh, *settings, *more) for more in ((), (PARAMS,)))
    for step in (1, 2):
        assert moved.update(batch, step) == plain.update(batch, step)
    assert torch.equal(weights(moved), weights(plain))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("in_shards", [False, True])
def test_state_that_waits_on_the_host_ends_with_the_same_bits(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    mesh: DeviceMesh,
    optimizer: str,
    in_shards: bool,
) -> None:
    def made(*more: str) -> TorchTrainEngine:
        given = (named(optimizer), *more)
        return sharded(char_llama, tmp_path, mesh, *given) if in_shards else engine(char_llama, tmp_path, *given)

    plain, moved, resumed = made(), made(STATE), made(STATE)
    for step in (1, 2):
        assert moved.update(batch, step) == plain.update(batch, step)
    host = moved.optimizer.host
    assert host is not None and plain.optimizer.host is None
    waiting = {
        (parameter, key): value
        for part in moved.optimizer.parts
        for parameter, state in part.state.items()
        for key, value in state.items()
        if value.dim()
    }
    assert waiting and all(host._buffers[place] is value for place, value in waiting.items())
    saved = {name: tensor.clone() for name, tensor in moved.optimizer.state().items()}
    expected = plain.optimizer.state()
    assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in saved)
    resumed.model.load_state_dict(moved.model.state_dict())
    resumed.optimizer.load(saved)
    for trained in (plain, resumed):
        trained.update(batch, 3)
    assert torch.equal(weights(resumed), weights(plain))


def test_offloaded_weights_are_saved_and_state_goes_on_without_the_offload(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    mesh: DeviceMesh,
) -> None:
    """Both keys: the state lies where the weights do, and nothing is copied back for the step."""
    moved, plain = (sharded(char_llama, tmp_path, mesh, *more) for more in ((PARAMS, STATE), ()))
    assert moved.optimizer.host is None
    before = moved.log_probs(batch).ragged("log_probs").values
    assert torch.equal(before, plain.log_probs(batch).ragged("log_probs").values)
    moved.update(batch, 1)
    plain.model.load_state_dict(moved.model.state_dict())
    plain.optimizer.load(moved.optimizer.state())
    for trained in (moved, plain):
        trained.update(batch, 2)
    left, right = gathered_state(moved.model), gathered_state(plain.model)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_an_offloaded_critic_ends_with_the_same_bits(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    mesh: DeviceMesh,
) -> None:
    batch = batch.with_columns({"values": batch["ref_log_probs"], "returns": batch["advantages"]})
    ended: list[torch.Tensor] = []
    for more in ((), ("critic.fsdp.optimizer_offload=true",), ("critic.fsdp.param_offload=true",)):
        config, plan = planned(tmp_path, "algorithm.adv_estimator=gae", *more)
        model = load_critic(char_llama, device=CPU, trust_remote_code=False)
        shard(model, mesh, offload=config.critic.fsdp.param_offload)
        trained = CriticEngine(model, config, plan)
        trained.update(batch, 1)
        ended.append(torch.cat([tensor.detach().flatten() for _, tensor in trained.weights()]))
    assert torch.equal(ended[0], ended[1]) and torch.equal(ended[0], ended[2])


SHAPE = ModelShape(
    parameters=7_000_000_000, layers=28, hidden_size=3584, intermediate_size=18944, attention_heads=28, kv_heads=4,
    head_dim=128, vocab_size=152064, max_positions=32768,
)  # fmt: skip


def test_the_memory_plan_knows_what_lies_on_the_host(tmp_path: Path) -> None:
    def planned_memory(*more: str) -> Memory:
        config, plan = planned(tmp_path, "actor_rollout_ref.actor.use_kl_loss=true", *more)
        return estimate(config, replace(plan, world=8), SHAPE)

    plain, state, params, both = (planned_memory(*more) for more in ((), (STATE,), (PARAMS,), (PARAMS, STATE)))
    passing = state.parts["activations"] + state.parts["logits"]
    assert state.parts["optimizer"] == max(0, plain.parts["optimizer"] - passing)
    assert state.parts["weights"] == plain.parts["weights"]
    assert params.parts["optimizer"] == params.parts["gradients"] == 0
    assert params.parts == both.parts
    gathered = 4 * (7_000_000_000 - (hidden := 28 * 233_046_016) + 2 * hidden // 28)
    assert params.parts["weights"] == 7_000_000_000 // 8 * 4 + gathered  # the reference's shard stays
    reference = planned_memory(PARAMS, "actor_rollout_ref.ref.fsdp_config.param_offload=true")
    assert reference.parts["weights"] == 2 * gathered
    assert not any("host memory" in words for words in plain.assumed)
    assert any(f"{4 * 4 * 875_000_000 / 2**30:.2f} GiB of host memory" in words for words in params.assumed)
    assert any(f"{2 * 4 * 875_000_000 / 2**30:.2f} GiB of host memory" in words for words in state.assumed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gpu_has_the_bytes_free_that_lie_on_the_host(
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    optimizer: str,
) -> None:
    size = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
    model = resolve_model("builtin:char-llama", override_config=size, seed=3, cache=tmp_path)
    held: dict[str, int] = {}
    ended: dict[str, torch.Tensor] = {}
    mesh = alone(torch.device("cuda"))
    try:
        for kind, more in (("plain", ()), ("state", (STATE,)), ("params", (PARAMS,))):
            before = torch.cuda.memory_allocated()
            trained = sharded(model, tmp_path, mesh, named(optimizer), *more)
            assert device_of(trained.model).type == "cuda"
            for step in (1, 2):
                trained.update(batch, step)
            state = trained.optimizer.state()
            trained.optimizer.load(state)
            trained.update(batch, 3)
            held[kind] = torch.cuda.memory_allocated() - before
            ended[kind] = weights(trained).cpu()
            kept = sum(tensor.nbytes for tensor in state.values() if tensor.dim())
            del trained, state
    finally:
        dist.destroy_process_group()
    total = ended["plain"].nbytes
    assert held["plain"] - held["state"] == pytest.approx(kept, rel=0.05)
    assert held["plain"] - held["params"] == pytest.approx(kept + total, rel=0.05)
    for kind in ("state", "params"):
        torch.testing.assert_close(ended[kind], ended["plain"], atol=1e-5, rtol=0)
