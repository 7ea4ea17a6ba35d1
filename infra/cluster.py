"""The Ray cluster of an attempt: the one at RAY_ADDRESS, or a local one that dies with this process."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from moonshift.core.errors import ServiceError


@contextmanager
def cluster(start_timeout_s: float) -> Iterator[None]:
    """Connect to Ray, and disconnect (or stop the local cluster) at the end.

    A local cluster listens on loopback only, has no dashboard, and its processes are tied to this one by the kernel, so
    that a SIGKILL leaves none behind.

    Raises:
        ServiceError: when the cluster cannot be reached or started.
    """
    address = os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", str(int(start_timeout_s)))
    try:
        if address:
            ray.init(address=address, namespace="moonshift", log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(
                include_dashboard=False,
                namespace="moonshift",
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
            )
    except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        where = f"the cluster at RAY_ADDRESS={address}" if address else "a local cluster"
        raise ServiceError(f"Ray cannot use {where}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def has_gpu() -> bool:
    """Whether any node of the cluster offers a GPU."""
    return ray.cluster_resources().get("GPU", 0) >= 1
