"""FLOP of training are those that torch counts, and no device's peak is guessed."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from moonshift.core.batch import Ragged
from moonshift.core.training.attention import Spans, _within
from moonshift.core.training.flops import ModelFlops, peak_flops, utilisation
from moonshift.core.training.layout import TokenLayout, lay_out
from moonshift.core.training.log_probs import TokenScorer

SMALL: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
}
PROMPTS = [[3, 4, 5], [3, 4, 5], [6], [7, 8, 9, 10, 11], [7, 8, 9, 10, 11]]
RESPONSES = [[1, 2, 12, 13, 4, 4], [14], [17, 18, 19], [20, 3], [21]]


def layout(rows: list[int]) -> TokenLayout:
    prompts, responses = (Ragged.from_list(each, torch.int64) for each in (PROMPTS, RESPONSES))
    return lay_out(prompts, responses, torch.tensor(rows), torch.device("cpu"))


def counted(config: PretrainedConfig) -> tuple[Any, ModelFlops]:
    model = AutoModelForCausalLM.from_config(config)
    flops = ModelFlops.of(model, model.config, model.get_output_embeddings())
    assert flops is not None
    return model, flops


@pytest.mark.parametrize("frozen", ["", "mlp"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_products_with_weights_are_those_that_torch_counts(name: str, frozen: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in key)
    flops = ModelFlops.of(model, model.config, model.get_output_embeddings())
    packed = layout([0, 1, 2, 3, 4])
    with FlopCounterMode(display=False) as counter:
        found, _ = TokenScorer(model)(packed, temperature=1.0, vocab_limit=29, entropy_use="none")
        found.sum().backward()
    by_torch = {str(op): value for op, value in counter.get_flop_counts()["Global"].items()}
    assert flops is not None
    expected = flops.training(len(packed.input_ids), len(packed.predicted_from), [])
    assert expected == by_torch.get("aten.mm", 0) + by_torch.get("aten.addmm", 0)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 100])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [0, 2, 3], [2]])
def test_attention_counts_every_pair_that_is_seen(rows: list[int], window: int | None) -> None:
    _, flops = counted(MistralConfig(**SMALL, sliding_window=window))
    packed = layout(rows)
    of_weights = flops.training(len(packed.input_ids), len(packed.predicted_from), [])
    pairs = seen(packed.spans, window)
    layers, forward_and_backward, scores_and_values, heads, head_dim = 3, 3, 2, 4, 4
    each = 2 * heads * head_dim * scores_and_values * forward_and_backward * layers
    assert flops.of_layout(packed) - of_weights == each * pairs


def seen(spans: Spans, window: int | None) -> int:
    """Pairs that the mask of the exact attention lets through."""
    padded = spans.padded()
    mask = padded.sees if window is None else padded.sees & _within(spans, padded, window)
    return int(mask.flatten(0, 2)[padded.places].sum())


def test_some_layers_may_have_a_window() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    settings = Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=2, layer_types=kinds)
    assert counted(settings)[1].windows == (2, None, 2)


def test_of_stacked_experts_those_count_that_a_token_is_sent_to() -> None:
    one, four = (
        counted(MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=used))[1].body for used in (1, 4)
    )
    assert four - one == 3 * 3 * 3 * 16 * 24  # layers, experts, matrices of one, hidden, intermediate


def test_samples_alone_cost_what_their_own_layouts_cost() -> None:
    _, flops = counted(CONFIGS["llama"])
    lengths = [torch.tensor([len(row) for row in rows]) for rows in (PROMPTS, RESPONSES)]
    assert flops.of_samples(*lengths) == sum(flops.of_layout(layout([row])) for row in range(5))
    assert flops.of_layout(layout([0, 1, 2, 3, 4])) < flops.of_samples(*lengths)  # two prompts are shared


def test_a_model_whose_attention_is_another_is_not_guessed_at() -> None:
    model = torch.nn.Linear(2, 2)
    assert ModelFlops.of(model, PretrainedConfig(), model) is None
    assert ModelFlops.of(model, Qwen3NextConfig(**SMALL), model) is None


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H200", torch.bfloat16, 989.5),
        ("NVIDIA H200", torch.float32, 494.5),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.5),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.0),
        ("NVIDIA A100-SXM4-80GB", torch.float16, 312.0),
        ("NVIDIA A100-SXM4-80GB", torch.float64, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, None),
        ("NVIDIA L40", torch.bfloat16, None),
        ("cpu", torch.float32, None),
    ],
)
def test_a_device_has_its_makers_peak_or_none(name: str, dtype: torch.dtype, tera: float | None) -> None:
    assert peak_flops(name, dtype) == (None if tera is None else tera * 1e12)


def test_utilisation_is_work_over_what_the_devices_could_have_done() -> None:
    found = utilisation({"perf/tflop/actor": 100.0, "perf/tflop_unshared/actor": 150.0}, "actor", 2.0, 200e12)
    assert found == {"perf/mfu/actor": 0.25, "perf/mfu_unshared/actor": 0.375}
    assert utilisation({"actor/loss": 1.0}, "actor", 2.0, 200e12) == {}
