"""How the ranks of a model find each other: a store on rank 0 whose port is bound before anyone is told of it.

The port is never chosen and then bound, so no other process can take it in between; two groups on one machine cannot
meet, since the operating system gives each a port of its own.
"""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented, but not in __all__)
from torch.distributed.device_mesh import DeviceMesh

from moonshift.core.errors import ServiceError

Address = tuple[str, int]
"""Host and port of a store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank's place in a group."""

    rank: int
    world: int
    timeout_s: float
    """of the meeting and of every collective after it"""


def open_store(host: str, timeout_s: float) -> TCPStore:
    """The store of a new group, listening on `host`; `store.port` is where."""
    listening = socket.create_server((host, 0), backlog=1024)
    port = listening.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),  # the store owns it from here on
    )


def join(store: TCPStore | Address, seat: Seat, device: torch.device) -> DeviceMesh:
    """Become rank `seat.rank` of the group that meets at the store, gloo on the CPU and nccl on GPUs; its mesh.

    Waits for all other ranks.

    Raises:
        ServiceError: when the store cannot be reached or some rank does not come in time.
    """
    timeout = timedelta(seconds=seat.timeout_s)
    host = store.host if isinstance(store, TCPStore) else store[0]
    _use_interface_of(host)
    try:
        if not isinstance(store, TCPStore):
            store = TCPStore(host, store[1], is_master=False, timeout=timeout)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.world, timeout=timeout)
        return DeviceMesh(device.type, torch.arange(seat.world), mesh_dim_names=("dp",))
    except (dist.DistError, RuntimeError) as error:
        raise ServiceError(
            f"Rank {seat.rank} of {seat.world} could not join its group at {host} within {seat.timeout_s:.0f} s: "
            f"{error}"
        ) from error


def _use_interface_of(host: str) -> None:
    """Have gloo listen where the store does: on one machine, on loopback alone."""
    if not host.startswith("127."):
        return  # each machine has its own address; gloo finds it by the machine's name
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.family is socket.AF_INET and address.address == host for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
