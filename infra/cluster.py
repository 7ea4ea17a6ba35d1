"""The Ray cluster of an attempt: the one at RAY_ADDRESS, or a local one that dies with this process."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from moonshift.core.errors import ServiceError

from .files import write_text
from .home import home


@contextmanager
def cluster(start_timeout_s: float) -> Iterator[None]:
    """Connect to Ray, and disconnect (or stop the local cluster) at the end.

    A local cluster listens on loopback only, has no dashboard, and its head is tied to this process by the kernel, so
    that a SIGKILL ends it too; for what is stuck below the head see `orphans`.

    Raises:
        ServiceError: when the cluster cannot be reached or started.
    """
    address = os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", str(int(start_timeout_s)))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            ray.init(address=address, namespace="moonshift", log_to_driver=False, logging_level=logging.ERROR)
        else:
            with _no_cloud_look_up():
                ray.init(
                    include_dashboard=False, namespace="moonshift", log_to_driver=False, logging_level=logging.ERROR
                )
    except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        where = f"the cluster at RAY_ADDRESS={address}" if address else "a local cluster"
        raise ServiceError(f"Ray cannot use {where}: {error}") from error
    _take_back(handler)
    try:
        yield
    finally:
        ray.shutdown()
        _take_back(handler)


@contextmanager
def _no_cloud_look_up() -> Iterator[None]:
    """Ray's head asks three clouds' metadata addresses where it runs, even with usage reports off.

    It does not where it finds its launcher's file in the home folder, so the cluster is started with a home of ours;
    workers get the user's back (`workers_home`).
    """
    folder = home() / "ray"
    folder.mkdir(exist_ok=True)
    write_text(folder / "ray_bootstrap_config.yaml", "{}\n")
    before = os.environ.get("HOME")
    os.environ["HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["HOME"]
        else:
            os.environ["HOME"] = before


def workers_home() -> dict[str, str]:
    """The user's own HOME for the workers of a local cluster: see `_no_cloud_look_up`."""
    return {} if os.environ.get("RAY_ADDRESS") else {"HOME": os.path.expanduser("~")}


def _take_back(handler: Any) -> None:
    """Put the earlier SIGTERM handler back: Ray's own one aborts the process, and Ray's shutdown takes them all off."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def num_gpus() -> int:
    """GPUs of the whole cluster."""
    return int(ray.cluster_resources().get("GPU", 0))
