"""When the memory runs out: passes half as large, the same result, and a clear end where nothing helps."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moonshift.core.batch import Batch
from moonshift.core.errors import MemoryLimitError, WorkerLostError
from moonshift.core.training.memory import MemoryLimit, once_more, out_of_memory

from .test_engine import batch, engine, in_float64, weights  # noqa: F401 (batch is a fixture)


def raising(times: int, then: Callable[[], str] = lambda: "done") -> Callable[..., str]:
    left = [times]

    def work(*_: object) -> str:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return then()

    return work


def test_passes_are_halved_until_they_fit() -> None:
    limit = MemoryLimit("actor", 12)
    sizes: list[int] = []

    def work(size: int, tokens: int | None) -> str:
        sizes.append(size)
        if size > 2:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return "done"

    assert limit.run(work, 5, lambda: None) == "done"
    assert sizes == [12, 6, 3, 1] and limit.divisor == 8
    assert limit.metrics() == {"perf/memory_divisor/actor": 8.0}


def test_a_token_budget_never_falls_below_the_longest_sample() -> None:
    limit = MemoryLimit("actor", 1, 100)
    budgets: list[int | None] = []

    def work(size: int, tokens: int | None) -> None:
        budgets.append(tokens)
        raise MemoryError

    with pytest.raises(MemoryLimitError, match=r"\[1, 30\].*ppo_max_token_len_per_gpu"):
        limit.run(work, 30, lambda: None)
    assert budgets == [100, 50, 30]


def test_what_is_too_large_for_ever_names_stage_size_and_keys() -> None:
    limit = MemoryLimit("log_prob", 4)
    with pytest.raises(MemoryLimitError) as caught:
        limit.run(raising(99), 700, lambda: None)
    for word in ("log_prob", "[1, 700]", "log_prob_micro_batch_size_per_gpu", "data.max_response_length", "2.00 GiB"):
        assert word in str(caught.value)


def test_other_errors_pass_and_are_not_tried_again() -> None:
    limit = MemoryLimit("actor", 4)
    with pytest.raises(RuntimeError, match="shapes"):
        limit.run(lambda *_: (_ for _ in ()).throw(RuntimeError("shapes do not fit")), 5, lambda: None)
    assert limit.divisor == 1
    assert not out_of_memory(ValueError("no")) and out_of_memory(MemoryError())


def test_work_without_a_size_is_tried_once_more() -> None:
    assert once_more("advantage", raising(1)) == "done"
    with pytest.raises(MemoryLimitError, match="twice in advantage"):
        once_more("advantage", raising(2))


@pytest.mark.case("X06")
@pytest.mark.parametrize("at", [1, 3])
def test_an_update_that_runs_out_of_memory_ends_with_the_same_weights(
    char_llama: Path,
    tmp_path: Path,
    batch: Batch,  # noqa: F811
    at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, short = (in_float64(engine(char_llama, tmp_path)) for _ in range(2))
    expected = plain.update(batch, 1)
    backward, calls = short._backward, [0]

    def failing(*arguments: object) -> dict[str, float]:
        calls[0] += 1
        if calls[0] == at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return backward(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(short, "_backward", failing)
    if at > 1:
        short.limit.divisor = 4  # several passes, so that the third one can fail
    found = short.update(batch, 1)
    torch.testing.assert_close(weights(short), weights(plain), atol=2e-5, rtol=0)
    assert found["actor/loss"] == pytest.approx(expected["actor/loss"], abs=1e-6)
    # Adam's step hardly depends on the gradient's size, so the weights alone would not show a gradient counted twice
    assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
    assert found["rollout_corr/kl"] == pytest.approx(expected["rollout_corr/kl"], abs=1e-6)
    assert found["perf/memory_divisor/actor"] == (2.0 if at == 1 else 8.0)
    assert short.optimizer_steps == 1


def test_where_ranks_share_the_passes_none_begins_again_alone() -> None:
    limit = MemoryLimit("actor", 4, shared=True)
    for size, divisor in ((4, 2), (2, 4)):
        tried: list[int] = []

        def work(samples: int, tokens: int | None, seen: list[int] = tried) -> str:
            seen.append(samples)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        with pytest.raises(WorkerLostError, match=f"passes {divisor} times smaller"):
            limit.run(work, 5, lambda: None)
        assert tried == [size] and limit.divisor == divisor
    with pytest.raises(MemoryLimitError, match="one sample"):
        limit.run(raising(1), 5, lambda: None)
