"""Adapters: what is trained, what is served, and what stays as it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedModel

from moonshift.core.batch import Batch
from moonshift.core.config.schema import ModelSection
from moonshift.core.errors import CheckpointError, ConfigError
from moonshift.core.plan import ModelShape
from moonshift.core.plan.memory import adapter_parameters, estimate
from moonshift.core.training.engine import TorchTrainEngine
from moonshift.core.training.log_probs import TokenScorer
from moonshift.core.training.lora import (
    adapter_off,
    adapter_state,
    add_adapter,
    base_sha256,
    load_adapter,
    merged_weights,
    save_adapter,
)
from moonshift.core.training.model import load_model
from moonshift.core.training.parallel import recompute_blocks, shard
from moonshift.infra.engines.transformers import TransformersEngine
from moonshift.infra.workers.process_group import alone

from .test_engine import batch, engine, planned  # noqa: F401 (batch is a fixture)

CPU = torch.device("cpu")
LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.05")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    yield alone(CPU)
    dist.destroy_process_group()


def adapted(model: Path, **settings: object) -> PreTrainedModel:
    made = load_model(model, device=CPU)
    add_adapter(made, ModelSection.model_validate({"path": "x", "lora_rank": 4} | settings), seed=1)
    return made


def trainer(
    model: Path, tmp_path: Path, mesh: DeviceMesh | None = None, dtype: torch.dtype = torch.float32
) -> TorchTrainEngine:
    config, plan = planned(tmp_path, *LORA)
    scorer = TokenScorer(adapted(model))
    if mesh is not None:
        shard(scorer, mesh, dtype)
    return TorchTrainEngine(scorer, config, plan, vocab_limit=14)


def values(model: TorchTrainEngine, rows: Batch) -> torch.Tensor:
    return model.log_probs(rows).ragged("log_probs").values


def copied(trained: TorchTrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trained.weights()}


@pytest.mark.case("W03")
def test_a_weight_is_served_with_its_adapter_once_however_often_it_is_synced(char_llama: Path) -> None:
    trained, served = adapted(char_llama, lora_rank=1, lora_alpha=1), load_model(char_llama, device=CPU)
    name = "model.layers.0.self_attn.q_proj"
    with torch.no_grad():
        for part, value in (("base_layer", 1.0), ("lora_A.default", 1.0), ("lora_B.default", 0.5)):
            trained.get_parameter(f"{name}.{part}.weight").fill_(value)
    engine = TransformersEngine(served, vocab_limit=14, max_sequences=8)
    found: list[float] = []
    for version in range(3):
        engine.load_weights(merged_weights(trained), version)
        found += served.get_parameter(f"{name}.weight").unique().tolist()
    assert found == [1.5, 1.5, 1.5]
    assert trained.get_parameter(f"{name}.base_layer.weight").unique().tolist() == [1.0]


def test_a_fresh_adapter_changes_nothing_and_only_it_is_trained(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
) -> None:
    trained, plain = trainer(char_llama, tmp_path), engine(char_llama, tmp_path)
    assert torch.equal(values(trained, batch), values(plain, batch))
    assert list(copied(trained)) == list(copied(plain))
    base = {name: tensor.clone() for name, tensor in trained.model.state_dict().items() if "lora" not in name}
    trained.update(batch, 1)
    after = trained.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())
    changed = [name for name, tensor in trained.weights() if not torch.equal(tensor, dict(plain.weights())[name])]
    assert len(changed) == 2 * 7 and all("_proj.weight" in name for name in changed)  # two layers of seven
    assert {name.rpartition(".")[0] for name in trained.optimizer.state()} == {
        name for name in after if ".lora_" in name
    }


def test_without_its_adapter_the_trained_model_is_the_reference(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
) -> None:
    trained = trainer(char_llama, tmp_path)
    trained.update(batch, 1)
    with adapter_off(trained.model):
        off = values(trained, batch)
    assert torch.equal(off, values(engine(char_llama, tmp_path), batch))
    assert not torch.equal(off, values(trained, batch))


def test_the_merged_weights_are_the_policy_that_was_trained(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
) -> None:
    trained, plain = trainer(char_llama, tmp_path), engine(char_llama, tmp_path)
    trained.update(batch, 1)
    plain.model.load_state_dict(copied(trained), strict=False)
    torch.testing.assert_close(values(plain, batch), values(trained, batch), atol=1e-5, rtol=0)


@pytest.mark.parametrize("reference_first", [False, True])
def test_in_shards_an_adapter_is_trained_as_whole(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    mesh: DeviceMesh,
    reference_first: bool,
) -> None:
    """A shard's first pass without the adapter must not keep the gradient of the later ones away."""
    one, whole = trainer(char_llama, tmp_path, mesh), trainer(char_llama, tmp_path)
    if reference_first:
        with adapter_off(one.model):
            torch.testing.assert_close(values(one, batch), values(whole, batch), atol=1e-6, rtol=0)
    assert one.update(batch, 1) == pytest.approx(whole.update(batch, 1), rel=1e-5, abs=1e-7)
    found, expected = copied(one), copied(whole)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0)


def test_passes_in_bfloat16_train_an_adapter_in_float32(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    mesh: DeviceMesh,
) -> None:
    rounded, exact = trainer(char_llama, tmp_path, mesh, torch.bfloat16), trainer(char_llama, tmp_path)
    found, expected = rounded.update(batch, 1), exact.update(batch, 1)
    assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=0.05)
    assert found["actor/grad_norm"] > 0
    assert {tensor.dtype for tensor in (*copied(rounded).values(), *rounded.optimizer.state().values())} == {
        torch.float32
    }


def test_an_adapter_under_recomputed_blocks_ends_with_the_same_bits(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
) -> None:
    plain, thrifty = trainer(char_llama, tmp_path), trainer(char_llama, tmp_path)
    recompute_blocks(thrifty.model)
    assert plain.update(batch, 1) == thrifty.update(batch, 1)
    assert all(torch.equal(tensor, copied(thrifty)[name]) for name, tensor in copied(plain).items())


def test_a_saved_adapter_loads_with_peft_and_only_over_its_own_base(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
) -> None:
    trained = trainer(char_llama, tmp_path)
    trained.update(batch, 1)
    base = base_sha256(load_model(char_llama, device=CPU))
    settings = ModelSection.model_validate({"path": "x", "lora_rank": 4})
    save_adapter(tmp_path / "adapter", adapter_state(trained.model), settings, base)
    again = adapted(char_llama)
    load_adapter(again, tmp_path / "adapter", base)
    assert all(torch.equal(*pair) for pair in zip(again.parameters(), trained.model.parameters(), strict=True))
    ids = torch.tensor([[3, 4, 5, 6]])
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(char_llama), tmp_path / "adapter")
    torch.testing.assert_close(theirs(ids).logits, again(ids).logits, atol=1e-6, rtol=0)
    with pytest.raises(CheckpointError, match="Bring back the model"):
        load_adapter(again, tmp_path / "adapter", "0" * 64)
    with pytest.raises(CheckpointError, match="other layers"):
        load_adapter(adapted(char_llama, target_modules=("q_proj",)), tmp_path / "adapter", base)


@pytest.mark.parametrize("names", [("no_such",), ("lm_head", "q_proj"), ("embed_tokens",)])
def test_layers_that_cannot_have_an_adapter_are_refused(char_llama: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="target_modules"):
        adapted(char_llama, target_modules=names)


def test_an_adapter_is_the_same_from_the_same_seed_and_leaves_the_generator_alone(char_llama: Path) -> None:
    state = torch.get_rng_state()
    first, second = adapted(char_llama), adapted(char_llama)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("changes", [{}, {"target_modules": ("q_proj", "down_proj")}, {"exclude_modules": ("k_proj",)}])
def test_the_memory_plan_counts_the_adapter_and_no_reference(
    char_llama: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    made = adapted(char_llama, **changes)
    count = sum(parameter.numel() for parameter in made.parameters() if parameter.requires_grad)
    shape = ModelShape(
        parameters=sum(p.numel() for p in made.parameters()) - count, layers=2, hidden_size=32, intermediate_size=64,
        attention_heads=2, kv_heads=made.config.num_key_value_heads, head_dim=16, vocab_size=14, max_positions=512,
    )  # fmt: skip
    settings = ModelSection.model_validate({"path": "x", "lora_rank": 4} | changes)
    assert adapter_parameters(settings, shape) == count
    config, plan = planned(tmp_path, LORA[0], "actor_rollout_ref.actor.use_kl_loss=true")
    parts = estimate(config, plan, shape).parts
    whole = adapter_parameters(config.actor_rollout_ref.model, shape)
    assert parts["weights"] == (shape.parameters + whole) * 4
    assert (parts["gradients"], parts["optimizer"]) == (whole * 4, whole * 8)
