"""One model in shards of this process alone: what passes compute in, and what they keep."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from moonshift.core.batch import Batch
from moonshift.core.training.critic import CriticEngine, load_critic
from moonshift.core.training.engine import TorchTrainEngine
from moonshift.core.training.layout import lay_out
from moonshift.core.training.log_probs import TokenScorer
from moonshift.core.training.model import load_model, resolve_model
from moonshift.core.training.parallel import gathered_state, ranks_of, recompute_blocks, shard
from moonshift.infra.workers.process_group import alone

from .test_engine import batch, engine, planned, weights  # noqa: F401 (batch is a fixture)

CPU = torch.device("cpu")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    yield alone(CPU)
    dist.destroy_process_group()


def sharded(model: Path, tmp_path: Path, mesh: DeviceMesh, dtype: torch.dtype) -> TorchTrainEngine:
    config, plan = planned(tmp_path)
    scorer = TokenScorer(load_model(model, device=CPU))
    shard(scorer, mesh, dtype)
    return TorchTrainEngine(scorer, config, plan, vocab_limit=14)


def test_one_shard_trains_as_the_whole_model_does(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    mesh: DeviceMesh,
) -> None:
    plain, one = engine(char_llama, tmp_path), sharded(char_llama, tmp_path, mesh, torch.float32)
    assert ranks_of(one.model).alone and isinstance(next(one.model.parameters()), DTensor)
    before = {name: tensor.clone() for name, tensor in plain.weights()}
    assert all(torch.equal(before[name], tensor) for name, tensor in one.weights())
    expected, found = plain.update(batch, 1), one.update(batch, 1)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    torch.testing.assert_close(weights(one), weights(plain), atol=1e-5, rtol=0)


def test_passes_in_bfloat16_leave_weights_and_optimizer_in_float32(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    mesh: DeviceMesh,
) -> None:
    exact, rounded = engine(char_llama, tmp_path), sharded(char_llama, tmp_path, mesh, torch.bfloat16)
    first, second = (one.log_probs(batch).ragged("log_probs").values for one in (exact, rounded))
    assert second.dtype == torch.float32 and not torch.equal(first, second)
    torch.testing.assert_close(second, first, atol=0.05, rtol=0)
    expected, found = exact.update(batch, 1), rounded.update(batch, 1)
    assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=0.05)
    assert {tensor.dtype for _, tensor in rounded.weights()} == {torch.float32}
    assert {tensor.dtype for tensor in rounded.optimizer.state().values()} == {torch.float32}


def test_a_critic_in_bfloat16_gives_float32_values_near_the_exact_ones(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    mesh: DeviceMesh,
) -> None:
    config, plan = planned(tmp_path, "algorithm.adv_estimator=gae")
    found: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_critic(char_llama, device=CPU, trust_remote_code=False)
        torch.nn.init.ones_(model.head.weight)
        shard(model, mesh, dtype)
        found.append(CriticEngine(model, config, plan).values(batch).values)
    exact, rounded = found
    assert rounded.dtype == torch.float32 and not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, atol=0.1 * float(exact.abs().max()), rtol=0)


def kept_bytes(trained: TorchTrainEngine, rows: Batch) -> int:
    """What an update's passes keep for their gradients."""
    total = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    layout = lay_out(rows.ragged("prompt_ids"), rows.ragged("response_ids"), torch.arange(len(rows)).repeat(8), CPU)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        scored = trained.policy(layout, temperature=1.0, vocab_limit=14, entropy_use="none")
    del scored
    return total


def test_a_model_that_recomputes_keeps_less_and_ends_with_the_same_bits(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
) -> None:
    plain, thrifty = engine(char_llama, tmp_path), engine(char_llama, tmp_path)
    recompute_blocks(thrifty.model)
    assert kept_bytes(thrifty, batch) < 0.5 * kept_bytes(plain, batch)
    assert plain.update(batch, 1) == thrifty.update(batch, 1)
    assert torch.equal(weights(plain), weights(thrifty))


def test_a_critic_that_recomputes_ends_with_the_same_bits(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
) -> None:
    config, plan = planned(tmp_path, "algorithm.adv_estimator=gae")
    batch = batch.with_columns({"values": batch["ref_log_probs"], "returns": batch["advantages"]})
    ended: list[torch.Tensor] = []
    for recomputes in (False, True):
        model = load_critic(char_llama, device=CPU, trust_remote_code=False)
        torch.nn.init.ones_(model.head.weight)
        if recomputes:
            recompute_blocks(model)
        trained = CriticEngine(model, config, plan)
        trained.update(batch, 1)
        ended.append(torch.cat([tensor.detach().flatten() for _, tensor in trained.weights()]))
    assert torch.equal(*ended)


@pytest.mark.parametrize("in_shards", [False, True])
def test_the_fused_optimizer_goes_on_from_a_state_that_either_wrote(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    mesh: DeviceMesh,
    in_shards: bool,
) -> None:
    """As on a GPU, where it is used: its step count lies beside the parameter then."""

    def trained(fused: bool) -> TorchTrainEngine:
        made = sharded(char_llama, tmp_path, mesh, torch.float32) if in_shards else engine(char_llama, tmp_path)
        made.optimizer.fused = fused
        made.optimizer.load({})
        return made

    ended: list[torch.Tensor] = []
    for first, second in ((False, False), (False, True), (True, True), (True, False)):
        one, two = trained(first), trained(second)
        one.update(batch, 1)
        two.model.load_state_dict(one.model.state_dict())
        two.optimizer.load(one.optimizer.state())
        two.update(batch, 2)
        assert two.optimizer.parts[0].defaults["fused"] is second
        ended.append(weights(two))
    for found in ended[1:]:
        torch.testing.assert_close(found, ended[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_in_shards_is_saved_as_the_whole_one_is(tmp_path: Path, mesh: DeviceMesh, tied: bool) -> None:
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    source = resolve_model("builtin:char-llama", override_config=settings, seed=3, cache=tmp_path)
    model = AutoModelForCausalLM.from_pretrained(source, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "whole")
    shard(model, mesh)
    model.save_pretrained(tmp_path / "shards", state_dict=gathered_state(model))
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "shards").iterdir())
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "shards" / name).read_bytes(), name
    assert ("lm_head.weight" in load_file(tmp_path / "shards" / "model.safetensors")) is not tied


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_pass_that_ran_out_of_memory_leaves_nothing_to_the_next(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    mesh: DeviceMesh,
    half: str,
) -> None:
    """In the middle of the second pass, when some gradients of the first wait and some of its own are there."""
    unbroken = sharded(char_llama, tmp_path, mesh, torch.float32)
    broken = sharded(char_llama, tmp_path, mesh, torch.float32)
    unbroken.limit.divisor, broken.limit.divisor = 4, 2
    expected = unbroken.update(batch, 1)
    calls = 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("CUDA out of memory")

    def hooked(_: torch.nn.Module, __: object, output: torch.Tensor) -> None:
        fail() if half == "forward" else output.register_hook(fail)

    broken.model.get_submodule("model.layers.0").register_forward_hook(hooked)
    found = broken.update(batch, 1)
    assert found["perf/memory_divisor/actor"] == 4
    assert found == pytest.approx(expected, rel=1e-6)
    assert torch.equal(weights(broken), weights(unbroken))


def test_a_forward_pass_leaves_the_weights_as_they_are_trained(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    mesh: DeviceMesh,
) -> None:
    rounded = sharded(char_llama, tmp_path, mesh, torch.bfloat16)
    before = weights(rounded)
    rounded.log_probs(batch)
    assert weights(rounded).dtype == torch.float32 and torch.equal(before, weights(rounded))
