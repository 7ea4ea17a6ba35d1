"""The formulas of the speed benches against loops over tokens, and against the figures of the peers' workload."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.against_trl import merge
from bench.workload import SHAPES, Machine, limits, mean, model_folder, prompts, rates, rollout_bytes, training_flop

TINY = SHAPES["tiny"]
H200 = Machine(peak_tflops=989, sustained_tflops=790, bandwidth_tbs=4.3)


def test_bytes_of_a_rollout_are_those_of_a_loop_over_its_tokens() -> None:
    read = 0
    for position in range(TINY.response_tokens):
        read += TINY.parameters
        for _ in range(TINY.sequences):
            read += (TINY.prompt_tokens + position) * TINY.layers * 2 * TINY.kv_heads * TINY.head_dim
    assert rollout_bytes(TINY) == 2 * read
    assert rollout_bytes(TINY, bytes_each=4) == 4 * read


def test_flop_of_training_are_those_of_a_loop_over_its_tokens() -> None:
    flop = 0
    for position in range(TINY.prompt_tokens + TINY.response_tokens):
        seen = position + 1
        scores_and_values = 2 * 2 * seen * TINY.heads * TINY.head_dim * TINY.layers
        flop += 6 * TINY.parameters + 3 * scores_and_values
    assert training_flop(TINY) == TINY.sequences * flop


def test_limits_of_the_peers_workload_are_the_published_ones() -> None:
    found = limits(SHAPES["1.7b"], H200)
    assert SHAPES["1.7b"].parameters == 1_711_376_384
    assert found["generate_s"] == pytest.approx(6.6, abs=0.1)
    assert found["update_s"] == pytest.approx(5.1, abs=0.05)
    assert found["tokens_per_s"] == pytest.approx(33_600, rel=0.01)
    assert found["peak_gib"] == pytest.approx(25.5, abs=0.05)


def test_mfu_is_one_at_the_peak() -> None:
    seconds = training_flop(TINY) / (H200.peak_tflops * 1e12)
    found = rates(TINY, H200, step_s=2 * seconds, update_s=seconds)
    assert found == pytest.approx({"mfu": 1.0, "step_mfu": 0.5, "tokens_per_s": TINY.tokens / (2 * seconds)})


def test_peaks_are_the_largest_and_all_else_is_averaged() -> None:
    steps = [{"step_s": 1.0, "peak_gib": 3.0}, {"step_s": 2.0, "peak_gib": 1.0}]
    assert mean(steps) == {"step_s": 1.5, "peak_gib": 3.0}


def test_a_bench_model_has_its_shape_and_reads_a_prompt_of_so_many_words(tmp_path: Path) -> None:
    folder = model_folder("tiny", tmp_path)
    assert model_folder("tiny", tmp_path) == folder
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.num_parameters(), model.dtype) == (TINY.parameters, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == TINY.vocab
    for ids in prompts(TINY, 1):
        assert tokenizer(" ".join(f"w{token}" for token in ids))["input_ids"] == ids
    assert prompts(TINY, 1) == prompts(TINY, 1) != prompts(TINY, 2)


def test_results_of_another_shape_stay_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "results" / "found.json"
    merge(file, {"135m": {"step_s": 1}, "commit": "a"})
    merge(file, {"1.7b": {"step_s": 2}, "commit": "b"})
    assert file.read_text().count("step_s") == 2
    assert '"commit": "b"' in file.read_text()
