"""One model in shards over several processes (FSDP2), and what its passes compute in and keep.

How a model is spread is read off its parameters, so that no caller has to carry it along.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from .ranks import Ranks


def ranks_of(model: nn.Module) -> Ranks:
    """The processes over which `shard` has spread a model; any other model is this process's alone."""
    parameter = next(model.parameters())
    return Ranks(parameter.device_mesh.get_group()) if isinstance(parameter, DTensor) else Ranks()


def device_of(model: nn.Module) -> torch.device:
    """Where a model's passes run; its shards may lie in host memory."""
    parameter = next(model.parameters())
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype = torch.float32, *, offload: bool = False) -> None:
    """Spread a model in place over the ranks of a one-dimensional mesh, block by block (FSDP2, arXiv 2304.11277).

    Passes compute in `dtype`; the weights stay what they are, and gradients are summed in their type. They are summed
    over the ranks and not averaged: a loss is normalised by counts of the whole mini-batch. Each rank must have loaded
    the same weights. `offload`: shards and their gradients lie in host memory, pinned where the device is a GPU; each
    block is copied to the device for its passes.
    """
    weights = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=weights)
    place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    for block in _blocks(model):
        # one rank has no other's shards to give back: its backward pass finds the weights as the forward pass left them
        gives_back = mesh.size() > 1 or offload
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=place, reshard_after_forward=gives_back)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=place)
    for part in _shards(model):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction


def more_passes(model: nn.Module, follow: bool) -> None:
    """Say before a backward pass whether more of the same mini-batch follow.

    While they do, one rank alone leaves its weights gathered and adds gradients up where they are, instead of copying
    all weights and all gradients to and fro at each pass. Several ranks, and one whose weights lie in host memory, go
    on giving both back: memory is their reason for shards.
    """
    if not ranks_of(model).alone or device_of(model).type != next(model.parameters()).device.type:
        return
    for part in _shards(model):
        part.set_reshard_after_backward(not follow, recurse=False)
        part.set_requires_gradient_sync(not follow, recurse=False)


def end_passes(model: nn.Module) -> None:
    """Put a model back in shards after passes without a backward half, or that ended early, and forget their gradients.

    Weights stay gathered, in the type that passes compute in, until the next backward pass. An exception leaves more:
    gradients on their way to the shards, which the next pass would add to, and bookkeeping by which it would leave out
    those of the outermost part. FSDP's own `reset_iter_state` (torch 2.13) keeps gradients that wait for later passes.
    """
    for part in _shards(model):
        state = part._get_fsdp_state()
        if part is model and hasattr(part, "reset_iter_state"):
            part.reset_iter_state()
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        if (group := state._fsdp_param_group) is not None:
            group._training_state = TrainingState.IDLE
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        part.reshard()


def recompute_blocks(model: nn.Module) -> None:
    """Have every block keep its input alone, and compute the rest again in the backward pass (arXiv 1604.06174).

    The numbers are the same. It comes before `shard`, which wraps around it.
    """
    for block in _blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def _shards(model: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in model.modules() if isinstance(part, FSDPModule))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The model's layers: of the classes that its authors say are never split over devices."""
    parts = list(model.modules())
    names = {name for part in parts if isinstance(part, PreTrainedModel) for name in part._no_split_modules or ()}
    return [part for part in parts if type(part).__name__ in names]


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, on the device; every rank has to ask, in the same order.

    One rank alone has it, without a copy unless it lies in host memory.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    near = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(near, DTensor)
    return near.to_local() if near.device_mesh.size() == 1 else near.full_tensor()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, the same storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters by name, tied ones once, in the model's order, each whole; a collective for each where sharded."""
    return ((name, whole(parameter)) for name, parameter in model.named_parameters())


def gathered(tensor: Tensor) -> Tensor:
    """A tensor to be written: of a shard the full one on the host of rank 0, and nothing elsewhere."""
    if not isinstance(tensor, DTensor):
        return tensor
    full = whole(tensor)
    return full.cpu() if tensor.device_mesh.get_rank() == 0 else full.new_empty(0)


def gathered_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state by name, each tensor as `gathered` gives it; tied ones are one tensor under several names."""
    owners = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    found: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        owner = owners.get(name, id(tensor))
        if owner not in found:
            found[owner] = gathered(tensor)
        state[name] = found[owner]
    return state


def sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a tensor that every rank has whole, on the parameter's device; never the same storage."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        near = distribute_tensor(tensor.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
        return near.to(parameter.device)
    return tensor.to(parameter.device, copy=True)


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
