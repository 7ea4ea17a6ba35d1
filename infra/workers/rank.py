"""One process of those that share a model: its device and threads, and how it meets the others."""

import os

import torch
from ray.util import get_node_ip_address
from torch.distributed.device_mesh import DeviceMesh

from moonshift.core.config import config_from_json
from moonshift.core.plan import BatchPlan
from moonshift.core.training.ranks import Ranks

from ..home import stacks_folder
from . import stacks
from .memory_log import MemoryLog
from .process_group import Address, Seat, join, open_store


class RankWorker:
    """One rank of `plan.world`; alone until it has joined."""

    def __init__(self, config_json: str, plan: BatchPlan, rank: int = 0) -> None:
        self.config = config_from_json(config_json)
        self.plan = plan
        self.rank = rank
        self.ranks = Ranks()
        self.mesh: DeviceMesh | None = None
        trainer = self.config.trainer
        cuda = trainer.device == "cuda" or (trainer.device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda" if cuda else "cpu")
        self.memory = MemoryLog(self.device)
        if trainer.num_threads:
            torch.set_num_threads(trainer.num_threads)
        elif plan.world > 1 and not cuda:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // trainer.n_gpus_per_node))
        # some CUDA kernels (cumsum of the sampler) have no deterministic form: warn there, refuse on the CPU
        torch.use_deterministic_algorithms(self.config.run.deterministic, warn_only=cuda)
        torch.set_float32_matmul_precision("high" if cuda else "highest")

    def identify(self) -> int:
        """This process's id, from then on one that writes its stack when asked (`stacks`)."""
        return stacks.enable(stacks_folder())

    def open_store(self, host: str | None = None) -> Address:
        """Rank 0 of several: begin the meeting of all, by default at this node's address, and say where it is."""
        self.store = open_store(host or get_node_ip_address(), self.config.recovery.start_timeout_s)
        return self.store.host, self.store.port

    def join(self, address: Address) -> None:
        """Become one of `plan.world` ranks; waits for the others.

        A collective may last as long as a stage may: whoever waits for the stage finds out first that it hangs.
        """
        recovery = self.config.recovery
        seat = Seat(
            rank=self.rank,
            world=self.plan.world,
            timeout_s=max(recovery.start_timeout_s, recovery.stage_timeout_s),
        )
        self.mesh = join(self.store if self.rank == 0 else address, seat, self.device)
        self.ranks = Ranks(self.mesh.get_group())
