"""The training engine: what an update depends on, and what it does not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from moonshift.core.batch import Batch, Ragged
from moonshift.core.config import load_config
from moonshift.core.config.schema import Config
from moonshift.core.plan import BatchPlan, make_plan
from moonshift.core.training.attention import PACKED
from moonshift.core.training.engine import TorchTrainEngine
from moonshift.core.training.layout import lay_out
from moonshift.core.training.log_probs import TokenScorer
from moonshift.core.training.model import load_model

PROMPTS, RESPONSES = 4, 4


@pytest.fixture
def batch() -> Batch:
    """`PROMPTS * RESPONSES` samples of unequal length with log-probs, advantages and a reference."""
    draw = torch.Generator().manual_seed(1)

    def integers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=draw).tolist()

    rows = PROMPTS * RESPONSES
    prompts = [integers(3, 12, length) for length in integers(2, 7, rows)]
    responses = [integers(3, 12, length) for length in integers(1, 6, rows)]

    def floats(scale: float) -> Ragged:
        values = [(torch.randn(len(response), generator=draw) * scale).tolist() for response in responses]
        return Ragged.from_list(values, torch.float32)

    return Batch(
        {
            "prompt_ids": Ragged.from_list(prompts, torch.int64),
            "response_ids": Ragged.from_list(responses, torch.int64),
            "loss_mask": Ragged.from_list([[True] * len(response) for response in responses], torch.bool),
            "advantages": floats(1.0),
            "ref_log_probs": floats(0.5),
            "rollout_log_probs": floats(0.5),
        }
    )


def engine(model: Path, tmp_path: Path, *overrides: str) -> TorchTrainEngine:
    config, plan = planned(tmp_path, *overrides)
    return TorchTrainEngine(TokenScorer(load_model(model, device=torch.device("cpu"))), config, plan, vocab_limit=14)


def planned(tmp_path: Path, *overrides: str) -> tuple[Config, BatchPlan]:
    file = tmp_path / "run.yaml"
    file.write_text("data: {train_files: 'sums:?max=9'}\nactor_rollout_ref: {model: {path: 'builtin:char-llama'}}\n")
    given = {
        "data.train_batch_size": PROMPTS,
        "actor_rollout_ref.rollout.n": RESPONSES,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": PROMPTS * RESPONSES,
        "actor_rollout_ref.actor.optim.lr": 1e-2,
        "trainer.total_training_steps": 10,
    }
    config = load_config(file, (*(f"{key}={value}" for key, value in given.items()), *overrides)).config
    return config, make_plan(config, 100)


def in_float64(trained: TorchTrainEngine) -> TorchTrainEngine:
    """The same engine with weights and sums of gradients in float64.

    Adam's first step is lr · g / (|g| + eps): where a gradient is near zero it magnifies the rounding of float32 sums a
    thousand times, in whatever order they were made. What is left here are differences that no rounding explains.
    """
    trained.model.double()
    return trained


def weights(trained: TorchTrainEngine) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for _, tensor in trained.weights()])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_an_update_does_not_depend_on_the_cut_into_micro_batches(
    char_llama: Path, tmp_path: Path, batch: Batch, mode: str
) -> None:
    batch = batch.rename({"rollout_log_probs": "old_log_probs"})
    actor = "actor_rollout_ref.actor"
    ended = []
    for size in (16, 8, 1):
        trained = in_float64(engine(
            char_llama, tmp_path,
            f"{actor}.ppo_micro_batch_size_per_gpu={size}", f"{actor}.loss_agg_mode={mode}",
            f"{actor}.use_kl_loss=true", f"{actor}.entropy_coeff=0.01",
        ))  # fmt: skip
        metrics = trained.update(batch, 1)
        ended.append((weights(trained), metrics["actor/loss"], metrics["actor/grad_norm"], metrics["actor/kl_loss"]))
    for found in ended[1:]:
        torch.testing.assert_close(found[0], ended[0][0], atol=2e-5, rtol=0)
        assert found[1:] == pytest.approx(ended[0][1:], rel=1e-4)


def test_on_policy_the_old_log_probs_are_the_current_ones(char_llama: Path, tmp_path: Path, batch: Batch) -> None:
    recomputing, taking = engine(char_llama, tmp_path), engine(char_llama, tmp_path)
    assert taking.plan.on_policy
    old = recomputing.log_probs(batch)
    expected = recomputing.update(batch.with_columns({"old_log_probs": old["log_probs"]}), 1)
    found = taking.update(batch, 1)
    torch.testing.assert_close(weights(taking), weights(recomputing), atol=2e-5, rtol=0)
    assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)
    sampled, trained = batch.ragged("rollout_log_probs").values, old.ragged("log_probs").values
    difference = (sampled.exp() - trained.exp()).abs()
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(float(difference.mean()), rel=1e-4)
    assert found["training/rollout_probs_diff_max"] == pytest.approx(float(difference.max()), rel=1e-4)
    assert found["training/rollout_log_probs_diff_mean"] == pytest.approx(
        float((sampled - trained).abs().mean()), rel=1e-4
    )
    assert found["actor/entropy"] == pytest.approx(float(old.ragged("entropy").values.mean()), rel=1e-4)


def test_several_optimizer_steps_need_the_old_log_probs(tmp_path: Path) -> None:
    halves = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8")
    assert not planned(tmp_path, *halves)[1].on_policy
    assert not planned(tmp_path, "actor_rollout_ref.actor.ppo_epochs=2")[1].on_policy


def test_masked_tokens_have_no_gradient(char_llama: Path, tmp_path: Path, batch: Batch) -> None:
    """A token outside the loss mask may have any advantage: the weights come out the same."""
    masks = [[index != 0 for index, _ in enumerate(row)] for row in batch.rows("loss_mask")]
    masked = batch.with_columns({"loss_mask": Ragged.from_list(masks, torch.bool)})
    advantages = [
        [value if index else 1e3 for index, value in enumerate(row.tolist())] for row in batch.rows("advantages")
    ]
    shifted = masked.with_columns({"advantages": Ragged.from_list(advantages, torch.float32)})
    first, second = engine(char_llama, tmp_path), engine(char_llama, tmp_path)
    first.update(masked, 1)
    second.update(shifted, 1)
    assert torch.equal(weights(first), weights(second))


def test_a_gradient_that_is_not_finite_changes_nothing(char_llama: Path, tmp_path: Path, batch: Batch) -> None:
    trained = engine(char_llama, tmp_path)
    before = weights(trained).clone()
    broken = [[float("nan")] * len(row) for row in batch.rows("advantages")]
    metrics = trained.update(batch.with_columns({"advantages": Ragged.from_list(broken, torch.float32)}), 1)
    assert metrics["actor/skipped_updates"] == 1 and trained.optimizer_steps == 0
    assert torch.equal(weights(trained), before)


def test_a_token_budget_gives_the_update_of_a_fixed_cut(char_llama: Path, tmp_path: Path, batch: Batch) -> None:
    plain, packed = engine(char_llama, tmp_path), engine(
        char_llama, tmp_path, "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24", "data.max_prompt_length=12",
        "data.max_response_length=12",
    )  # fmt: skip
    assert packed.plan.actor.max_tokens == 24
    expected, found = plain.update(batch, 1), packed.update(batch, 1)
    torch.testing.assert_close(weights(packed), weights(plain), atol=2e-5, rtol=0)
    assert found["actor/loss"] == pytest.approx(expected["actor/loss"], rel=1e-4)
    first, second = (one.log_probs(batch).ragged("log_probs").values for one in (plain, packed))
    torch.testing.assert_close(first, second, atol=1e-4, rtol=0)


@pytest.mark.case("B05")
@pytest.mark.parametrize(("drop_last", "steps", "dropped"), [(False, 3, 0), (True, 2, 2)])
def test_a_partial_mini_batch_is_normalised_by_its_own_counts(
    char_llama: Path, tmp_path: Path, drop_last: bool, steps: int, dropped: int
) -> None:
    """10 samples of one token with advantage -1 in mini-batches of 4: the loss of a token is 1 in each step."""
    ids = Ragged.from_list([[3]] * 10, torch.int64)
    ones = Ragged.from_list([[1.0]] * 10, torch.float32)
    batch = Batch(
        {
            "prompt_ids": ids,
            "response_ids": ids,
            "loss_mask": Ragged.from_list([[True]] * 10, torch.bool),
            "advantages": Ragged.from_list([[-1.0]] * 10, torch.float32),
            "rollout_log_probs": ones,
        }
    )
    trained = engine(
        char_llama, tmp_path, f"actor_rollout_ref.actor.drop_last={str(drop_last).lower()}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    )  # fmt: skip
    metrics = trained.update(batch, 1)
    assert trained.optimizer_steps == steps
    assert metrics["training/dropped_samples"] == dropped
    assert metrics["actor/pg_loss"] == pytest.approx(1.0)  # the mean over the steps: 1 in each


@pytest.mark.case("B02")
@pytest.mark.parametrize("size", [4, 2, 1])
def test_gradient_accumulation_divides_once(char_llama: Path, tmp_path: Path, batch: Batch, size: int) -> None:
    """The norm of the gradient does not shrink with the number of passes."""
    rows = batch.reorder(torch.arange(4))
    one, many = engine(char_llama, tmp_path), engine(
        char_llama, tmp_path, f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={size}"
    )  # fmt: skip
    assert many.update(rows, 1)["actor/grad_norm"] == pytest.approx(one.update(rows, 1)["actor/grad_norm"], rel=1e-4)


class _FixedLogits(torch.nn.Module):
    """A model whose logits are the same everywhere."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.row = torch.tensor(logits)
        self.config = SimpleNamespace(vocab_size=len(logits), _attn_implementation=PACKED)
        self.base_model = _Ones(self.config)

    def get_output_embeddings(self) -> Any:
        return lambda states: states * self.row


class _Ones:
    """Hidden states of one number, 1."""

    def __init__(self, config: SimpleNamespace) -> None:
        self.config = config

    def __call__(self, input_ids: torch.Tensor, **options: Any) -> Any:
        return SimpleNamespace(last_hidden_state=torch.ones(*input_ids.shape, 1))


@pytest.mark.case("G08")
def test_the_temperature_divides_the_logits_and_not_the_log_probs() -> None:
    ids = (Ragged.from_list([[1]], torch.int64), Ragged.from_list([[0]], torch.int64))
    layout = lay_out(*ids, torch.arange(1), torch.device("cpu"))
    model = cast(PreTrainedModel, _FixedLogits([2.0, 1.0, 0.0]))
    found, _ = TokenScorer(model)(layout, temperature=0.6, vocab_limit=3, entropy_use="none")
    assert float(found) == pytest.approx(-0.202573, abs=1e-5)
