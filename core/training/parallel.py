"""One model in shards over several processes (FSDP2).

How a model is spread is read off its parameters, so that no caller has to carry it along.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from .ranks import Ranks


def ranks_of(model: nn.Module) -> Ranks:
    """The processes over which `shard` has spread a model; any other model is this process's alone."""
    parameter = next(model.parameters())
    return Ranks(parameter.device_mesh.get_group()) if isinstance(parameter, DTensor) else Ranks()


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Spread a model in place over the ranks of a one-dimensional mesh, block by block (FSDP2, arXiv 2304.11277).

    Gradients are summed over the ranks and not averaged: a loss is normalised by counts of the whole mini-batch.
    Each rank must have loaded the same weights.
    """
    names = {name for part in model.modules() if isinstance(part, PreTrainedModel) for name in _block_names(part)}
    for block in [part for part in model.modules() if type(part).__name__ in names]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction


def _block_names(model: PreTrainedModel) -> Iterable[str]:
    """Classes of a model's layers, which its authors say are never split over devices."""
    return model._no_split_modules or ()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard; every rank has to ask, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters by name, tied ones once, in the model's order, each whole; a collective for each where sharded."""
    return ((name, whole(parameter)) for name, parameter in model.named_parameters())


def gathered(tensor: Tensor) -> Tensor:
    """A tensor to be written: of a shard the full one on the host of rank 0, and nothing elsewhere."""
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.full_tensor()
    return full.cpu() if tensor.device_mesh.get_rank() == 0 else full.new_empty(0)


def gathered_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state by name, each tensor as `gathered` gives it."""
    return {name: gathered(tensor) for name, tensor in model.state_dict().items()}


def sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a tensor that every rank has whole, on the parameter's device; never the same storage."""
    moved = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return moved.clone()


class Probe:
    """Finishes a pass that was given up between forward and backward, so that the other ranks need not wait for it.

    Every gradient becomes NaN then, on every rank: the optimizer step is skipped by all of them alike.
    """

    def __init__(self, model: nn.Module) -> None:
        self._handle: Tensor | None = None
        model.register_forward_hook(self._remember)

    def _remember(self, _: nn.Module, __: Any, output: Any) -> None:
        first = output if isinstance(output, Tensor) else output[0]
        self._handle = first.flatten()[:1].sum() if first.requires_grad else None  # keeps the graph, not the logits

    def give_up(self) -> None:
        """The backward half of the last forward pass, with the gradient NaN."""
        if self._handle is not None:
            (self._handle * torch.nan).backward()
            self._handle = None
