"""`all_gather` of a batch: each rank's description and Arrow stream first, then the bytes of each tensor.

Invariant: every rank sees every description before any tensor is sent, so ranks whose columns do not fit fail together
instead of waiting for each other. Only bytes are sent; nothing is pickled.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DataError
from . import storage
from .columns import Column
from .ragged import DTYPES


def all_gather(
    columns: Mapping[str, Column], meta: Mapping[str, Any], group: dist.ProcessGroup | None
) -> list[storage.Loaded]:
    """`(columns, meta)` of every rank in rank order; tensors lie on the device of this rank's own column."""
    own = storage.tensors_of(columns)
    shapes = {name: [storage.dtype_name(tensor), list(tensor.shape)] for name, tensor in own.items()}
    document = storage.describe(columns, meta) | {"tensors": shapes}
    documents = [json.loads(text) for text in gather_bytes(json.dumps(document).encode(), group)]
    tables = [storage.from_stream(stream) for stream in gather_bytes(storage.to_stream(columns), group)]
    _check(documents)
    gathered: list[dict[str, torch.Tensor]] = [{} for _ in documents]
    for name in sorted(own):
        told = [document["tensors"][name] for document in documents]
        sizes = [torch.Size(shape).numel() * DTYPES[dtype].itemsize for dtype, shape in told]
        parts = _gather_flat(own[name].detach().contiguous().reshape(-1).view(torch.uint8), sizes, group)
        for rank, (part, (dtype, shape)) in enumerate(zip(parts, told, strict=True)):
            # the clone starts at a multiple of any dtype's size, and lets go of the padding
            gathered[rank][name] = part.clone().view(DTYPES[dtype]).reshape(shape).to(own[name].device)
    return [
        storage.assemble(document, tensors, table, f"rank {rank}")
        for rank, (document, tensors, table) in enumerate(zip(documents, gathered, tables, strict=True))
    ]


def _check(documents: list[dict[str, Any]]) -> None:
    """Same tensors of same dtype on every rank; all ranks come to the same verdict."""
    first = {name: dtype for name, (dtype, _) in documents[0]["tensors"].items()}
    for rank, document in enumerate(documents):
        found = {name: dtype for name, (dtype, _) in document["tensors"].items()}
        if found != first:
            differing = sorted(dict(first.items() ^ found.items()))
            raise DataError(
                f"all_gather: rank {rank} and rank 0 differ in {differing}; give all ranks the same columns"
            )


def gather_bytes(block: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """The block of every rank, in rank order; they may differ in length."""
    own = torch.frombuffer(bytearray(block), dtype=torch.uint8)
    device = _device(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(block)], device=device), group)
    parts = _gather_flat(own, [int(length) for length in lengths], group)
    return [part.cpu().numpy().tobytes() for part in parts]


def _gather_flat(own: torch.Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """uint8 `[size]` of every rank; sent padded to the longest, which every backend can do."""
    device, longest = _device(group), max(sizes)
    if longest == 0:
        return [own.new_empty(0) for _ in sizes]
    sent = torch.zeros(longest, dtype=torch.uint8, device=device)
    sent[: own.shape[0]] = own
    received = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(received, sent, group)
    return [part[:size] for part, size in zip(received, sizes, strict=True)]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's backend wants its tensors."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
