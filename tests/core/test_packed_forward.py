"""Packed sequences give what each sequence gives alone, and compute no token that is not one of theirs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from moonshift.core.batch import Batch, Ragged
from moonshift.core.errors import DataError, ModelError
from moonshift.core.training import log_probs as scoring
from moonshift.core.training.attention import PACKED, PLAIN, use_attention
from moonshift.core.training.layout import TokenLayout, lay_out
from moonshift.core.training.log_probs import TokenScorer
from moonshift.core.training.micro_batches import micro_batches

SMALL: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=4),
    "window": MistralConfig(**SMALL, sliding_window=3),
}
PROMPTS = [[3, 4, 5], [3, 4, 5], [3, 4, 5], [6], [7, 8, 9, 10, 11], [7, 8, 9, 10, 11], [3, 4, 5]]
RESPONSES = [[1, 2, 12, 13], [14], [15, 16], [17, 18, 19], [20], [21], [22, 23]]


@pytest.fixture(params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    torch.manual_seed(0)
    yield AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()


def layout(rows: list[int] | None = None) -> TokenLayout:
    chosen = torch.tensor(list(range(len(PROMPTS))) if rows is None else rows)
    return lay_out(ragged(PROMPTS), ragged(RESPONSES), chosen, torch.device("cpu"))


def ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.from_list(rows, torch.int64)


def alone(model: PreTrainedModel, row: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy of one response by a forward pass of its own, without padding."""
    use_attention(model, PLAIN)
    ids = torch.tensor([PROMPTS[row] + RESPONSES[row]])
    logits = model(input_ids=ids).logits[0, len(PROMPTS[row]) - 1 : -1] / temperature
    spread = torch.log_softmax(logits, -1)
    return spread.gather(1, torch.tensor(RESPONSES[row])[:, None]).squeeze(1), -(spread.exp() * spread).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_are_those_of_each_sequence_alone(model: PreTrainedModel, temperature: float) -> None:
    packed = layout()
    found, entropy = TokenScorer(model)(packed, temperature=temperature, vocab_limit=29, entropy_use="value")
    assert entropy is not None
    for row, response in enumerate(RESPONSES):
        expected, spread = alone(model, row, temperature)
        torch.testing.assert_close(found[row, : len(response)], expected, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(entropy[row, : len(response)], spread, atol=2e-6, rtol=1e-5)
    assert not found[~packed.response_mask].any()


def test_gradients_are_those_of_the_sequences_alone(model: PreTrainedModel) -> None:
    weights = [1.0, -2.0, 0.5, 3.0, -1.0, 0.25, 2.0]
    found, _ = TokenScorer(model)(layout(), temperature=1.0, vocab_limit=29, entropy_use="none")
    (found.sum(1) * torch.tensor(weights)).sum().backward()
    packed = gradient(model)
    model.zero_grad(set_to_none=True)
    for row, weight in enumerate(weights):
        (alone(model, row, 1.0)[0].sum() * weight).backward()
    torch.testing.assert_close(packed, gradient(model), atol=5e-6, rtol=1e-4)


def gradient(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("entropy_use", ["none", "value", "gradient"])
def test_logits_in_parts_change_no_value_and_no_gradient(
    monkeypatch: pytest.MonkeyPatch, entropy_use: scoring.EntropyUse
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["tied"])
    results = []
    for at_once in (10**6, 29 * 3, 29):
        monkeypatch.setattr(scoring, "_LOGITS_AT_ONCE", at_once)
        model.zero_grad(set_to_none=True)
        found, entropy = TokenScorer(model)(layout(), temperature=0.7, vocab_limit=27, entropy_use=entropy_use)
        loss = found.square().sum() + (
            entropy.square().sum() if entropy_use == "gradient" and entropy is not None else 0
        )
        loss.backward()
        results.append((found.detach(), entropy.detach() if entropy is not None else None, gradient(model)))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-5, rtol=1e-5)


def test_logits_are_never_whole_and_never_those_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    seen: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda module, given, out: seen.append(out.shape[0]))
    monkeypatch.setattr(scoring, "_LOGITS_AT_ONCE", 29 * 4)
    with torch.no_grad():
        TokenScorer(model)(layout(), temperature=1.0, vocab_limit=29, entropy_use="none")
    assert max(seen) <= 4 and sum(seen) == sum(map(len, RESPONSES))


def test_no_padding_and_no_shared_prompt_twice_is_computed() -> None:
    packed = layout()
    prompts = len(PROMPTS[0]) + len(PROMPTS[3]) + len(PROMPTS[4]) + len(PROMPTS[6])
    assert len(packed.input_ids) == prompts + sum(len(response) - 1 for response in RESPONSES)


def test_prompts_that_nobody_shares_need_no_gathered_keys() -> None:
    assert layout([0, 3, 4]).spans.keys is None
    assert layout([0, 1]).spans.keys is not None


def test_the_attention_of_generation_is_put_back_by_whoever_generates(model: PreTrainedModel) -> None:
    use_attention(model, PACKED)
    ids = torch.tensor([[3, 4, 5, 6]])
    packed = model(input_ids=ids).logits
    use_attention(model, PLAIN)
    torch.testing.assert_close(packed[0, :3], model(input_ids=ids).logits[0, :3], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (Gemma2Config(**SMALL, head_dim=4), "final_logit_softcapping"),
        (Gemma2Config(**SMALL, head_dim=4, final_logit_softcapping=None), "softcap"),
        (GraniteConfig(**SMALL, logits_scaling=2.0), "logits_scaling"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(config: Any, name: str) -> None:
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=name):
        TokenScorer(model)(layout(), temperature=1.0, vocab_limit=29, entropy_use="none")


def test_a_prompt_without_tokens_is_named() -> None:
    with pytest.raises(DataError, match="row 1 has no token"):
        lay_out(ragged([[3], []]), ragged([[4], [5]]), torch.arange(2), torch.device("cpu"))


def test_a_token_budget_counts_a_shared_prompt_once() -> None:
    batch = Batch({"prompt_ids": ragged(PROMPTS), "response_ids": ragged(RESPONSES)})
    passes = [rows.tolist() for rows in micro_batches(batch, torch.arange(7), 1, 11)]
    assert passes == [[0, 1, 2], [3, 4, 5], [6]]
    for rows in passes:
        assert len(layout(rows).input_ids) <= 11
