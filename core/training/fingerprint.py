"""One hash over all weights, so that two runs can be compared."""

import hashlib
from collections.abc import Iterable

import torch


def weights_sha256(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor, in the order of the names, hex."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights, key=lambda pair: pair[0]):
        host = tensor.detach().cpu().contiguous()
        digest.update(f"{name}\0{host.dtype}\0{tuple(host.shape)}\0".encode())
        digest.update(host.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
