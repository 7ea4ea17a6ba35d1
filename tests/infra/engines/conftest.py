"""The engines that are installed, each serving one small model whose weights a test may change."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from moonshift.core.batch import Batch
from moonshift.core.training.engine import Scoring, forward_log_probs
from moonshift.core.training.log_probs import TokenScorer
from moonshift.core.training.model import load_model, resolve_model
from moonshift.core.types import RolloutEngine, SamplingParams
from moonshift.infra.engines.transformers import TransformersEngine

CPU = torch.device("cpu")
MAX_MODEL_LEN = 512
BEYOND = 3
"""embedding rows past the tokenizer, which no engine may draw"""
HAS_VLLM = importlib.util.find_spec("vllm") is not None
NO_VLLM = "vLLM is not installed in this environment: make vllm-env, then test_vllm_environment.py runs these in it"
ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.skipif(not HAS_VLLM, reason=NO_VLLM))]
# vLLM's attention on the CPU takes heads of 32 and more
SETTINGS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
}


@dataclass
class Served:
    """One engine, and the model whose weights it serves once `sync` was called."""

    name: str
    engine: RolloutEngine
    model: PreTrainedModel
    vocab_limit: int
    _version: int = field(default=0)

    def sync(self, version: int = 0) -> None:
        self.engine.wake()
        self.engine.load_weights(self.model.named_parameters(), version)

    def trained(self, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
        """Log-probs of the batch's response tokens as training computes them."""
        scoring = Scoring(temperature=temperature, vocab_limit=self.vocab_limit)
        return forward_log_probs(TokenScorer(self.model), batch, 8, scoring)["log_probs"].values

    def assert_as_trained(self, batch: Batch, temperature: float = 1.0) -> None:
        found = batch.ragged("rollout_log_probs").values
        torch.testing.assert_close(found, self.trained(batch, temperature), atol=1e-4, rtol=0)


def params(n: int = 4, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, **rest: Any) -> SamplingParams:
    given = {"max_new_tokens": 9, "stop_ids": (1,)} | rest
    return SamplingParams(n=n, temperature=temperature, top_p=top_p, top_k=top_k, **given)


def ids(batch: Batch) -> list[list[int]]:
    return [row.tolist() for row in batch.rows("response_ids")]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a char-llama that every engine can serve, by its settings."""
    cache = tmp_path_factory.mktemp("engine-models")
    return lambda **changes: resolve_model(
        "builtin:char-llama", override_config=SETTINGS | changes, seed=3, cache=cache
    )


@pytest.fixture(scope="session")
def vllm_engines() -> dict[Path, Any]:
    """The session's vLLM engines by model folder: one takes 15 s to start on a CPU."""
    return {}


def build(name: str, folder: Path, engines: dict[Path, Any], model: PreTrainedModel | None = None) -> Served:
    """The engine `name` over the model in `folder`, its weights loaded as version 0."""
    model = model or load_model(folder, device=CPU)
    limit = model.config.vocab_size - BEYOND
    if name == "transformers":
        engine: Any = TransformersEngine(model, vocab_limit=limit, max_sequences=64)
    else:
        from moonshift.infra.engines.vllm import VllmEngine, VllmSettings

        if folder not in engines:
            settings = VllmSettings(
                folder=folder,
                device=CPU,
                dtype=torch.float32,
                vocab_limit=limit,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=64,
            )
            engines[folder] = VllmEngine(settings)
        engine = engines[folder]
        engine.budget(64)
    served = Served(name, engine, model, limit)
    served.sync()
    return served


@pytest.fixture(params=ENGINES)
def served(request: pytest.FixtureRequest, small_model: Callable[..., Path], vllm_engines: dict[Path, Any]) -> Served:
    """Every installed engine, with the weights that the model's folder holds."""
    return build(request.param, small_model(), vllm_engines)
