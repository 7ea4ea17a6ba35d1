"""Muon: its formula, which parameters it has, and that shards and checkpoints change nothing."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from moonshift.core.batch import Batch
from moonshift.core.config.schema import ModelSection, OptimSection
from moonshift.core.errors import ModelError
from moonshift.core.plan import ModelShape
from moonshift.core.plan.memory import adapter_parameters, estimate, optimizer_numbers
from moonshift.core.training.critic import CriticEngine, load_critic
from moonshift.core.training.engine import TorchTrainEngine
from moonshift.core.training.log_probs import TokenScorer
from moonshift.core.training.lora import add_adapter
from moonshift.core.training.model import load_model
from moonshift.core.training.muon import Muon, orthogonalised
from moonshift.core.training.parallel import shard
from moonshift.infra.workers.process_group import alone

from .test_engine import batch, engine, planned, weights  # noqa: F401 (batch is a fixture)

CPU = torch.device("cpu")
MUON = "actor_rollout_ref.actor.optim.optimizer=Muon"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    yield alone(CPU)
    dist.destroy_process_group()


def expected_step(weight: np.ndarray, gradient: np.ndarray, momentum: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Jordan et al. 2024, float64: M ← 0.9 M + G; O = NS5(G + 0.9 M); arXiv 2502.16982 eq. 4 with lr 0.1, decay 0.5."""
    momentum = 0.9 * momentum + gradient
    found = gradient + 0.9 * momentum
    found = found / np.linalg.norm(found)
    for _ in range(5):
        cubic = found @ found.T @ found
        quintic = found @ found.T @ cubic
        found = 3.4445 * found - 4.7750 * cubic + 2.0315 * quintic
    return weight - 0.1 * (0.2 * np.sqrt(max(weight.shape)) * found + 0.5 * weight), momentum


@pytest.mark.parametrize("shape", [(24, 24), (12, 40), (40, 12), (1, 8)])
def test_steps_are_those_of_the_papers_formula(shape: tuple[int, int]) -> None:
    draw = np.random.default_rng(2)
    weight, momentum = draw.normal(size=shape), np.zeros(shape)
    parameter = torch.nn.Parameter(torch.tensor(weight, dtype=torch.float32))
    optimizer = Muon([parameter], lr=0.1, momentum=0.9, weight_decay=0.5)
    for _ in range(3):
        gradient = draw.normal(size=shape)
        weight, momentum = expected_step(weight, gradient, momentum)
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
    np.testing.assert_allclose(parameter.detach().numpy(), weight, atol=2e-5)


def test_a_step_is_torchs_within_the_rounding_of_bfloat16() -> None:
    draw = torch.Generator().manual_seed(4)
    start, gradient = (torch.randn(48, 32, generator=draw) for _ in range(2))
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    made = Muon([ours], lr=0.1, momentum=0.95, weight_decay=0.1)
    peer = torch.optim.Muon([theirs], lr=0.1, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for parameter, optimizer in ((ours, made), (theirs, peer)):
        parameter.grad = gradient.clone()
        optimizer.step()
    moved = (ours - start).detach()
    assert float((ours - theirs).detach().norm() / moved.norm()) < 0.02
    assert float(moved.square().mean().sqrt()) == pytest.approx(0.1 * 0.2, rel=0.3)  # the size of AdamW's


def test_singular_values_end_near_one_and_nothing_stays_nothing() -> None:
    found = orthogonalised(torch.randn(32, 64, generator=torch.Generator().manual_seed(5)))
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.65 and float(values.max()) < 1.25
    assert torch.equal(orthogonalised(torch.zeros(3, 4)), torch.zeros(3, 4))


def kinds(state: dict[str, torch.Tensor]) -> dict[str, set[str]]:
    """Names of the state's tensors, by parameter."""
    found: dict[str, set[str]] = {}
    for key in state:
        owner, _, kind = key.rpartition(".")
        found.setdefault(owner, set()).add(kind)
    return found


ADAMW = {"step", "exp_avg", "exp_avg_sq"}


def test_hidden_matrices_have_a_momentum_and_all_else_is_adamws(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
) -> None:
    trained = engine(char_llama, tmp_path, MUON)
    trained.update(batch, 1)
    found = kinds(trained.optimizer.state())
    assert found.keys() == {name for name, _ in trained.weights()}
    for name, kept in found.items():
        assert kept == ({"momentum_buffer"} if "_proj.weight" in name else ADAMW), name


def test_a_critics_head_is_adamws(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
) -> None:
    config, plan = planned(tmp_path, "algorithm.adv_estimator=gae", "critic.optim.optimizer=Muon")
    trained = CriticEngine(load_critic(char_llama, device=CPU, trust_remote_code=False), config, plan)
    trained.update(batch.with_columns({"values": batch["ref_log_probs"], "returns": batch["advantages"]}), 1)
    found = kinds(trained.optimizer.state())
    assert found["head.weight"] == ADAMW
    assert sum(kept == {"momentum_buffer"} for kept in found.values()) == 2 * 7


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_adamws_tied_to_the_embeddings_or_not(char_llama: Path, tmp_path: Path, tied: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(char_llama, tie_word_embeddings=tied)
    config, plan = planned(tmp_path, MUON)
    trained = TorchTrainEngine(TokenScorer(model), config, plan, vocab_limit=14)
    muon, adamw = (len(part.param_groups[0]["params"]) for part in trained.optimizer.parts)
    norms = 2 * 2 + 1
    assert (muon, adamw) == (2 * 7, norms + (1 if tied else 2))


def adapted(model: Path, tmp_path: Path) -> TorchTrainEngine:
    config, plan = planned(tmp_path, MUON, "actor_rollout_ref.model.lora_rank=4")
    made = load_model(model, device=CPU)
    add_adapter(made, config.actor_rollout_ref.model, seed=1)
    return TorchTrainEngine(TokenScorer(made), config, plan, vocab_limit=14)


def sharded(model: Path, tmp_path: Path, mesh: DeviceMesh) -> TorchTrainEngine:
    config, plan = planned(tmp_path, MUON)
    scorer = TokenScorer(load_model(model, device=CPU))
    shard(scorer, mesh)
    return TorchTrainEngine(scorer, config, plan, vocab_limit=14)


@pytest.mark.parametrize("kind", ["whole", "adapter", "shards"])
def test_a_run_goes_on_from_its_state_bit_for_bit(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    mesh: DeviceMesh,
    kind: str,
) -> None:
    def made() -> TorchTrainEngine:
        if kind == "shards":
            return sharded(char_llama, tmp_path, mesh)
        return adapted(char_llama, tmp_path) if kind == "adapter" else engine(char_llama, tmp_path, MUON)

    unbroken, resumed = made(), made()
    start = weights(unbroken).clone()
    unbroken.update(batch, 1)
    assert not torch.equal(weights(unbroken), start)
    resumed.model.load_state_dict(unbroken.model.state_dict())
    saved = {name: tensor.clone() for name, tensor in unbroken.optimizer.state().items()}
    resumed.optimizer.load(saved)
    for trained in (unbroken, resumed):
        trained.update(batch, 2)
    assert torch.equal(weights(resumed), weights(unbroken))
    ended = resumed.optimizer.state()
    assert all(torch.equal(tensor, ended[name]) for name, tensor in unbroken.optimizer.state().items())
    assert any(not torch.equal(tensor, ended[name]) for name, tensor in saved.items())


def test_in_a_shard_it_trains_as_on_the_whole_model(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    mesh: DeviceMesh,
) -> None:
    one, plain = sharded(char_llama, tmp_path, mesh), engine(char_llama, tmp_path, MUON)
    for step in (1, 2):
        assert one.update(batch, step) == pytest.approx(plain.update(batch, step), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(weights(one), weights(plain), atol=1e-5, rtol=0)


def test_state_of_another_optimizer_is_refused_with_both_names(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
) -> None:
    adamw, muon = engine(char_llama, tmp_path), engine(char_llama, tmp_path, MUON)
    for trained in (adamw, muon):
        trained.update(batch, 1)
    first, second = adamw.optimizer.state(), muon.optimizer.state()
    with pytest.raises(ModelError, match=r"holds \['exp_avg', 'exp_avg_sq', 'step'\], and Muon keeps"):
        muon.optimizer.load(first)
    with pytest.raises(ModelError, match=r"holds \['momentum_buffer'\], and AdamW keeps"):
        adamw.optimizer.load(second)
    with pytest.raises(ModelError, match="lacks"):
        adamw.optimizer.load({"no.such.step": torch.ones(())})


@pytest.mark.parametrize("rank", [0, 4])
def test_the_plan_counts_the_numbers_that_the_optimizers_keep(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    rank: int,
) -> None:
    trained = adapted(char_llama, tmp_path) if rank else engine(char_llama, tmp_path, MUON)
    trained.update(batch, 1)
    kept = sum(tensor.numel() for tensor in trained.optimizer.state().values() if tensor.dim())
    settings = trained.policy.model.config
    shape = ModelShape(
        parameters=sum(tensor.numel() for _, tensor in trained.weights()), layers=2, hidden_size=32,
        intermediate_size=64, attention_heads=2, kv_heads=settings.num_key_value_heads, head_dim=16, vocab_size=14,
        max_positions=512,
    )  # fmt: skip
    adapter = adapter_parameters(ModelSection.model_validate({"path": "x", "lora_rank": rank}), shape)
    optim = OptimSection.model_validate({"optimizer": "Muon"})
    assert optimizer_numbers(optim, shape, adapter) == kept
    assert estimate(trained.config, trained.plan, shape).parts["optimizer"] == 4 * kept
