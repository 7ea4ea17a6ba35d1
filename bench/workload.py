"""The work that the speed benches share: shapes, models, prompts, counted FLOP, and the limits that bytes and FLOP set.

Invariant: both systems get the same model folder and the same number of tokens, and are measured by the same functions.
"""

import datetime
import os
import random
import shutil
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama with tied embeddings, its head dimension hidden / heads, and the work that is done with it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    prompts: int = 64
    samples: int = 8
    """a prompt"""
    prompt_tokens: int = 256
    response_tokens: int = 512

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Attention, gated feed-forward and two norms a layer; the embedding counts once, since it is the head too."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        block = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * block + self.vocab * self.hidden + self.hidden

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of all samples: a prompt counts once a sample, as a padded trainer computes it."""
        return self.sequences * (self.prompt_tokens + self.response_tokens)


SHAPES = {
    "1.7b": Shape(hidden=2048, intermediate=8192, layers=24, heads=32, kv_heads=32, vocab=49152),
    "135m": Shape(hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, vocab=49152),
    # for a CPU: vLLM's attention takes heads of 32 and more there
    "tiny": Shape(
        hidden=64,
        intermediate=128,
        layers=2,
        heads=2,
        kv_heads=1,
        vocab=512,
        prompts=4,
        samples=4,
        prompt_tokens=16,
        response_tokens=16,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the hardware can do."""

    peak_tflops: float
    """of the data sheet, dense; what MFU is a share of"""
    sustained_tflops: float
    """measured with large matrices"""
    bandwidth_tbs: float
    """of the GPU's memory, 10^12 bytes a second"""


def training_flop(shape: Shape) -> float:
    """FLOP of one forward and backward pass over all samples, nothing recomputed and no prompt shared.

    6·N a token (2 forward, 4 backward; arXiv 2001.08361 §2.1) for the matrices, and for causal attention, for each of
    the L·(L+1)/2 pairs of positions a layer, 4·heads·head_dim forward (scores and values) and twice that backward.
    """
    length = shape.prompt_tokens + shape.response_tokens
    pairs = shape.sequences * length * (length + 1) / 2
    attention = 12 * shape.layers * shape.heads * shape.head_dim * pairs
    return 6.0 * shape.parameters * shape.tokens + attention


def rollout_bytes(shape: Shape, *, bytes_each: int = 2) -> float:
    """Bytes that decoding reads: for each of T tokens all weights once, and each sequence's keys and values up to it.

    The token at position P+t reads the cache of P+t tokens, 2·layers·kv_heads·head_dim numbers each; summed over
    t = 0 … T-1 that is P·T + T·(T-1)/2 tokens a sequence. Attention that reads a shared prompt once a group could read
    less; this is the limit of an engine that does not.
    """
    steps = shape.response_tokens
    cached = shape.sequences * (shape.prompt_tokens * steps + steps * (steps - 1) / 2)
    each = 2 * shape.layers * shape.kv_heads * shape.head_dim
    return float(bytes_each) * (cached * each + steps * shape.parameters)


def limits(shape: Shape, machine: Machine) -> dict[str, float]:
    """The least that a step can take, under the names of what is measured; seconds, tokens a second, GiB.

    rollout_s = `rollout_bytes` / bandwidth. update_s = 6·N·tokens / sustained FLOP/s (attention left out).
    sync_s = weights read in float32 and written in bfloat16 / bandwidth. log_prob_s and advantage_s = 0: on-policy the
    update's own log-probs do. peak_gib = 16 bytes a parameter: weight, gradient and two moments of Adam in float32.
    """
    rollout = rollout_bytes(shape) / (machine.bandwidth_tbs * 1e12)
    update = 6.0 * shape.parameters * shape.tokens / (machine.sustained_tflops * 1e12)
    sync = 6.0 * shape.parameters / (machine.bandwidth_tbs * 1e12)
    step = rollout + sync + update
    return {
        "step_s": step,
        "rollout_s": rollout + sync,
        "generate_s": rollout,
        "sync_s": sync,
        "log_prob_s": 0.0,
        "advantage_s": 0.0,
        "update_s": update,
        "tokens_per_s": shape.tokens / step,
        "mfu": machine.sustained_tflops / machine.peak_tflops,
        "peak_gib": 16 * shape.parameters / GIB,
    }


def rates(shape: Shape, machine: Machine, *, step_s: float, update_s: float) -> dict[str, float]:
    """`tokens_per_s`; `mfu`, the update's (as verl's perf/mfu/actor), and `step_mfu`, its FLOP over the whole step."""
    peak = machine.peak_tflops * 1e12
    return {
        "tokens_per_s": shape.tokens / step_s,
        "mfu": training_flop(shape) / (update_s * peak),
        "step_mfu": training_flop(shape) / (step_s * peak),
    }


def mean(steps: list[dict[str, float]]) -> dict[str, float]:
    """Of each number its mean over the steps; of peaks (`*_gib`, `*_max`) the largest."""
    found = {}
    for name in steps[0]:
        values = [step[name] for step in steps if name in step]
        found[name] = max(values) if name.endswith(("_gib", "_max")) else sum(values) / len(values)
    return found


def model_folder(name: str, work: Path) -> Path:
    """The folder of a model of this shape with random bfloat16 weights and a tokenizer; written once, below `work`.

    The tokenizer has one word an id, `w3 w4 …`, as many as the model has rows, so that every id can be drawn and a
    text of 256 words has exactly 256 tokens for every system.
    """
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder, shape = work / f"model-{name}", SHAPES[name]
    if folder.is_dir():
        return folder
    draft = work / f"model-{name}.{os.getpid()}"
    draft.mkdir(parents=True)
    special = ["<unk>", "<eos>", "<pad>"]  # no part of another word: they are found inside of words too
    vocabulary = special + [f"w{index}" for index in range(len(special), shape.vocab)]
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token=special[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    names = dict(zip(("unk_token", "eos_token", "pad_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(draft)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    assert model.num_parameters() == shape.parameters, (model.num_parameters(), shape.parameters)
    torch.nn.Module.to(model, torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(draft)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    shutil.move(draft, folder)
    return folder


def prompts(shape: Shape, step: int) -> list[list[int]]:
    """Random prompts of one step; no control token among them."""
    draw = random.Random(step)
    return [[draw.randrange(3, shape.vocab) for _ in range(shape.prompt_tokens)] for _ in range(shape.prompts)]


def synchronize() -> None:
    """Wait for the GPU, so that a clock read next counts its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def begin_peak() -> None:
    """From now on `peak_memory` is counted."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> dict[str, float]:
    """GiB since `begin_peak`: `peak_gib` and `reserved_gib` of the trainer, `device_gib` of the whole GPU now.

    A sleeping vLLM keeps its addresses: PyTorch still counts what lies in vLLM's memory pool, although no memory is
    behind it. So what lies in pools of their own is taken off. `device_gib` is what the driver has given out, CUDA
    graphs, contexts and PyTorch's cache included.
    """
    if not torch.cuda.is_available():
        return {"peak_gib": 0.0, "reserved_gib": 0.0, "device_gib": 0.0}
    pooled = [one for one in torch.cuda.memory_snapshot() if tuple(one.get("segment_pool_id", (0, 0))) != (0, 0)]
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_gib": (torch.cuda.max_memory_allocated() - sum(one["allocated_size"] for one in pooled)) / GIB,
        "reserved_gib": (torch.cuda.max_memory_reserved() - sum(one["total_size"] for one in pooled)) / GIB,
        "device_gib": (total - free) / GIB,
        "engine_pools_gib": sum(one["total_size"] for one in pooled) / GIB,
    }


def provenance() -> dict[str, Any]:
    """Commit (environment variable BENCH_COMMIT, or git's), date, machine and versions."""
    commit = os.environ.get("BENCH_COMMIT")
    if not commit and shutil.which("git"):
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = asked.stdout.strip()
    return {
        "commit": commit or None,
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {name: _version(name) for name in ("torch", "transformers", "vllm", "trl")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def described(shape: Shape) -> dict[str, int]:
    """The shape as JSON."""
    return asdict(shape) | {"parameters": shape.parameters, "tokens": shape.tokens}
