"""The sampling loop: right tokens, right log-probs, its own randomness for each sample."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from moonshift.core.batch import Batch
from moonshift.core.training.engine import Scoring, forward_log_probs
from moonshift.core.training.log_probs import TokenScorer
from moonshift.core.training.model import load_model
from moonshift.core.types import SamplingParams
from moonshift.infra.engines.transformers import TransformersEngine

PROMPTS = [[4, 5, 14, 6], [7, 8, 9, 14, 3, 4, 5], [3]]
STOP = 1


@pytest.fixture
def model(char_llama: Path) -> PreTrainedModel:
    return load_model(char_llama, device=torch.device("cpu"))


def engine_of(model: PreTrainedModel, max_sequences: int = 64) -> TransformersEngine:
    return TransformersEngine(model, vocab_limit=model.config.vocab_size, max_sequences=max_sequences)


def params(n: int = 4, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0) -> SamplingParams:
    return SamplingParams(n=n, temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=9, stop_ids=(STOP,))


def ids(batch: Batch) -> list[list[int]]:
    return [row.tolist() for row in batch.rows("response_ids")]


def test_greedy_ids_equal_a_loop_without_cache_or_padding(model: PreTrainedModel) -> None:
    drawn = ids(engine_of(model).generate(PROMPTS, params(n=1, temperature=0), [0, 1, 2]))
    for prompt, response in zip(PROMPTS, drawn, strict=True):
        expected: list[int] = []
        while len(expected) < 9 and STOP not in expected:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + expected])).logits[0, -1]
            expected.append(int(logits.argmax()))
        assert response == expected


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_log_probs_are_those_of_the_training_engine(model: PreTrainedModel, temperature: float) -> None:
    batch = engine_of(model).generate(PROMPTS, params(temperature=temperature), list(range(12)))
    scoring = Scoring(temperature=temperature, vocab_limit=model.config.vocab_size)
    trained = forward_log_probs(TokenScorer(model), batch, 5, scoring)["log_probs"]
    torch.testing.assert_close(batch.ragged("rollout_log_probs").values, trained.values, atol=2e-6, rtol=0)


@pytest.mark.parametrize("max_sequences", [5, 64])
def test_each_response_is_told_once_as_soon_as_it_is_whole(model: PreTrainedModel, max_sequences: int) -> None:
    told: list[tuple[int, list[int]]] = []
    batch = engine_of(model, max_sequences).generate(
        PROMPTS, params(), list(range(12)), lambda row, response: told.append((row, list(response)))
    )
    assert sorted(told) == list(enumerate(ids(batch)))
    lengths = [len(response) for row, response in told if row < 5]
    assert lengths == sorted(lengths)  # those that are generated together are told as they end, not in row order
    assert len(set(lengths)) > 1


def test_a_sample_depends_on_its_own_seed_alone(model: PreTrainedModel) -> None:
    whole = ids(engine_of(model).generate(PROMPTS, params(), list(range(12))))
    queued = ids(engine_of(model, max_sequences=5).generate(PROMPTS, params(), list(range(12))))
    alone = ids(engine_of(model).generate(PROMPTS[1:2], params(n=1), [6]))
    assert whole == queued
    assert alone[0] == whole[6]
    assert len({tuple(row) for row in whole[4:8]}) > 1


def test_responses_end_at_a_stop_id_or_at_the_limit(model: PreTrainedModel) -> None:
    batch = engine_of(model).generate(PROMPTS, params(n=64), list(range(192)))
    reasons = batch.rows("finish_reason")
    assert set(reasons) == {"stop", "length"}
    for response, reason in zip(ids(batch), reasons, strict=True):
        assert STOP not in response[:-1]
        assert (response[-1] == STOP) == (reason == "stop")
        assert reason == "stop" or len(response) == 9


def test_draws_follow_the_model_distribution(model: PreTrainedModel) -> None:
    count = 4000
    one = SamplingParams(n=count, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=1, stop_ids=())
    drawn = engine_of(model, count).generate(PROMPTS[:1], one, list(range(count))).ragged("response_ids").values
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(PROMPTS[:1])).logits[0, -1].softmax(-1)
    seen = torch.bincount(drawn, minlength=len(expected)) / count
    assert float((seen - expected).abs().max()) < 5 * float((expected / count).sqrt().max())


def test_top_k_and_top_p_never_draw_what_they_leave_out(model: PreTrainedModel) -> None:
    with torch.no_grad():
        probabilities = model(input_ids=torch.tensor(PROMPTS[:1])).logits[0, -1].softmax(-1)
    ordered = probabilities.argsort(descending=True)
    nucleus = int((probabilities[ordered].cumsum(0) < 0.3).sum()) + 1
    for settings, allowed in ((params(n=300, top_k=3), ordered[:3]), (params(n=300, top_p=0.3), ordered[:nucleus])):
        batch = engine_of(model, 512).generate(PROMPTS[:1], settings, list(range(300)))
        assert {row[0] for row in ids(batch)} <= set(allowed.tolist())


@pytest.mark.case("T03")
def test_ids_beyond_the_tokenizer_are_never_drawn_and_carry_no_probability(model: PreTrainedModel) -> None:
    limit = 6
    with torch.no_grad():  # the model favours an id that the tokenizer does not know
        embedding = model.get_input_embeddings().weight
        assert isinstance(embedding, torch.Tensor)
        embedding[10] = embedding[:limit].sum(0) * 50
    engine = TransformersEngine(model, vocab_limit=limit, max_sequences=1024)
    batch = engine.generate([[3, 4]], params(n=1000), list(range(1000)))
    assert max(max(row) for row in ids(batch)) < limit
    trained = forward_log_probs(TokenScorer(model), batch, 512, Scoring(temperature=1.0, vocab_limit=limit))[
        "log_probs"
    ]
    torch.testing.assert_close(batch.ragged("rollout_log_probs").values, trained.values, atol=1e-5, rtol=0)


def test_new_weights_show_in_the_next_rollout(model: PreTrainedModel, char_llama: Path) -> None:
    engine = engine_of(model)
    before = engine.generate(PROMPTS, params(), list(range(12)))
    changed = load_model(char_llama, device=torch.device("cpu"))
    with torch.no_grad():
        next(changed.parameters()).mul_(1.5)
    engine.load_weights(changed.named_parameters(), 7)
    after = engine.generate(PROMPTS, params(), list(range(12)))
    fresh = engine_of(changed).generate(PROMPTS, params(), list(range(12)))
    assert engine.version == 7
    assert after.equals(fresh) and not after.equals(before)


def test_columns_are_ragged_and_in_prompt_order(model: PreTrainedModel) -> None:
    batch = engine_of(model).generate(PROMPTS, params(n=2), list(range(6)))
    assert batch.ragged("prompt_ids").to_list() == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2 + [PROMPTS[2]] * 2
