"""Runs what async rewards return to its end, from plain code and from inside a running event loop.

Invariant: one thread uses one event loop for all its calls, so that a client which a reward keeps stays usable.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_OWN = threading.local()


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, or what it raises.

    Runs in this thread; where a loop already runs in it (a notebook, an async worker), in a thread of its own.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _runner().run(coroutine)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward") as pool:
        return pool.submit(_run_alone, coroutine).result()


def _run_alone(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner() as runner:
        return runner.run(coroutine)


class _Kept:
    """Closes the loop when its thread or the process ends."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()

    def __del__(self) -> None:
        self.runner.close()


def _runner() -> asyncio.Runner:
    kept: _Kept | None = getattr(_OWN, "kept", None)
    if kept is None:
        kept = _OWN.kept = _Kept()
    return kept.runner
