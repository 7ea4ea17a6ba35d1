"""The optimizer of one model: AdamW for all of it, or Muon for its hidden matrices and AdamW for the rest.

Invariant: what is saved is whole and named by parameter, whatever the number of ranks and wherever the state lies.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from ..config.schema import OffloadSection, OptimSection
from ..errors import ModelError
from .muon import BUFFER, Muon
from .parallel import device_of, gathered, local, ranks_of, sharded_like, whole

STATE: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    Muon: (BUFFER,),
}
"""Names of the tensors that an optimizer keeps of each parameter."""


class ModelOptimizer:
    """Gradients and optimizer state of a model's trained parameters.

    `head`: the layer that turns hidden states into what the loss sees; it and every embedding stay with AdamW, as do
    norms, biases and stacked experts: all that is no matrix. With `offload.optimizer_offload` state lies in host memory
    but for the step itself.
    """

    def __init__(
        self, model: nn.Module, settings: OptimSection, offload: OffloadSection, head: nn.Module | None = None
    ) -> None:
        self.model = model
        self.settings = settings
        self.ranks = ranks_of(model)
        self.offloaded = offload.param_offload
        self.host = HostMemory(device_of(model)) if offload.optimizer_offload and not self.offloaded else None
        self.fused = device_of(model).type == "cuda"
        """AdamW as one kernel over all parameters"""
        left = {id(own) for part in model.modules() if isinstance(part, nn.Embedding) for own in part.parameters()}
        left |= {id(own) for own in head.parameters()} if head is not None else set()
        self._matrices = {
            name
            for name, one in self.trained()
            if settings.optimizer == "Muon" and one.dim() == 2 and id(one) not in left
        }
        self.parts = self._new_parts()

    def _new_parts(self) -> list[torch.optim.Optimizer]:
        settings, parts = self.settings, list[torch.optim.Optimizer]()
        matrices = [one for name, one in self.trained() if name in self._matrices]
        others = [one for name, one in self.trained() if name not in self._matrices]
        if matrices:
            parts.append(
                Muon(
                    matrices, lr=settings.lr, momentum=settings.muon_momentum, weight_decay=settings.weight_decay
                )
            )  # fmt: skip
        if others:
            parts.append(
                torch.optim.AdamW(
                    others,
                    lr=settings.lr,
                    betas=settings.betas,
                    eps=settings.eps,
                    weight_decay=settings.weight_decay,
                    fused=self.fused,
                )
            )
        return parts

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are not frozen, by name, tied ones once."""
        return ((name, one) for name, one in self.model.named_parameters() if one.requires_grad)

    def set_rate(self, rate: float) -> None:
        """The learning rate of the steps to come."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def clip(self, limit: float) -> float:
        """Scale the gradients down to a norm of `limit`; returns the norm that they had, over all ranks."""
        if not self.offloaded:
            return float(whole(clip_grad_norm_(self.model.parameters(), limit)))
        # the ranks of GPUs cannot sum what lies in host memory: each sums its own, and tells
        gradients = [local(one.grad) for _, one in self.trained() if one.grad is not None]
        norm = get_total_norm(gradients)
        if not self.ranks.alone:
            norm = torch.tensor(math.sqrt(self.ranks.sum({"square": float(norm) ** 2})["square"]))
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        return float(norm)

    def step(self) -> None:
        """Take one optimizer step, all ranks together."""
        for part in self.parts:
            for state in part.state.values():
                if self.host is not None:
                    self.host.fetch(state)
            part.step()
            for parameter, state in part.state.items():
                if self.host is not None:
                    self.host.put(parameter, state)
        if self.host is not None:
            self.host.wait()

    def state(self) -> dict[str, Tensor]:
        """The state as flat tensors `<parameter>.<name>`; of shards whole, on rank 0 alone."""
        return {
            f"{name}.{key}": gathered(value)
            for name, parameter in self.trained()
            for key, value in self._part_of(name).state.get(parameter, {}).items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Inverse of `state`; what there was before is dropped.

        Raises:
            ModelError: when a tensor belongs to no parameter, or a parameter has other state than its optimizer keeps.
        """
        self.parts = self._new_parts()
        saved: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            owner, _, kind = key.rpartition(".")
            saved.setdefault(owner, {})[kind] = value
        for name, parameter in self.trained():
            if name in saved:
                self._load(name, parameter, saved.pop(name))
        if saved:
            raise ModelError(f"The optimizer state names parameters that the model lacks: {sorted(saved)[:3]}.")

    def _load(self, name: str, parameter: nn.Parameter, saved: dict[str, Tensor]) -> None:
        part = self._part_of(name)
        expected = STATE[type(part)]
        if saved.keys() != set(expected):
            raise ModelError(
                f"The optimizer state of {name} holds {sorted(saved)}, and {type(part).__name__} keeps "
                f"{sorted(expected)}. Set optim.optimizer to what the checkpoint was written with."
            )
        # a step count lies on the host unless AdamW is fused, all else beside the parameter
        place = parameter.device if self.fused else torch.device("cpu")
        part.state[parameter] = {
            key: sharded_like(value, parameter) if value.dim() else value.to(place, copy=True)
            for key, value in saved.items()
        }
        if self.host is not None:
            self.host.put(parameter, part.state[parameter])
            self.host.wait()

    def _part_of(self, name: str) -> torch.optim.Optimizer:
        return self.parts[0] if name in self._matrices else self.parts[-1]


class HostMemory:
    """Where optimizer state waits between steps: in buffers of its own, pinned where the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[Tensor, str], Tensor] = {}

    def put(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Have a parameter's state lie here; it is there after `wait`. Step counts stay where they are."""
        for key, value in state.items():
            if value.dim():
                place = (parameter, key)
                if place not in self._buffers:
                    self._buffers[place] = torch.empty_like(value, device="cpu", pin_memory=self.device.type == "cuda")
                state[key] = self._buffers[place].copy_(value, non_blocking=True)

    def fetch(self, state: dict[str, Tensor]) -> None:
        """Bring a parameter's state back to the device."""
        for key, value in state.items():
            if value.dim():
                state[key] = value.to(self.device, copy=True, non_blocking=True)

    def wait(self) -> None:
        """Until the copies to the host are whole."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
