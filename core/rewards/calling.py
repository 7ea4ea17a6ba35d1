"""Calls one reward function on samples and turns whatever it does into one outcome a sample.

Invariant: as many outcomes as samples, in their order; nothing that user code raises or returns gets past here, except
what stops the process (KeyboardInterrupt, GeneratorExit).
"""

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Any

from ..errors import RewardContractError, RewardError
from ..types import Sample
from . import contracts, loading
from .awaiting import run_to_end
from .contracts import Contract
from .loading import LoadedReward
from .values import SHOWN, components

Outcome = dict[str, float] | RewardError | None
"""Components, or why there are none; None: the function says that it does not apply to this sample."""
CONCURRENT = 32
"""Samples that an async function of one sample works on at once."""


def outcomes(reward: LoadedReward, samples: Sequence[Sample], *, may_abstain: bool = False) -> list[Outcome]:
    """One outcome a sample, in order.

    `may_abstain`: None in the list of a TRL function stands for "does not apply", as TRL has it for several rewards.
    """
    if not samples:
        return []
    if reward.contract.batched:
        return _of_batch(reward, samples, may_abstain and reward.contract is Contract.TRL)
    results = [_begun(reward, sample) for sample in samples]
    if any(inspect.isawaitable(result) for result in results):
        results = run_to_end(_finished(reward, results, samples))
    return [_checked(reward, result, sample) for result, sample in zip(results, samples, strict=True)]


def _begun(reward: LoadedReward, sample: Sample) -> Any:
    """The result, something to await, or the error."""
    try:
        with UserCode(reward.spec, [sample]):
            return reward.call([sample])
    except RewardError as error:
        return error


async def _finished(reward: LoadedReward, results: Sequence[Any], samples: Sequence[Sample]) -> list[Any]:
    places = asyncio.Semaphore(CONCURRENT)

    async def finish(result: Any, sample: Sample) -> Any:
        if not inspect.isawaitable(result):
            return result
        async with places:
            try:
                with UserCode(reward.spec, [sample]):
                    return await result
            except RewardError as error:
                return error

    return await asyncio.gather(*map(finish, results, samples))


def _checked(reward: LoadedReward, result: Any, sample: Sample) -> Outcome:
    if isinstance(result, RewardError):
        return result
    try:
        what = f"Reward {reward.spec} on {sample.prompt.uid}"
        return components(result, what, skip_text=reward.contract is Contract.VERL)
    except RewardContractError as error:
        return error


def _of_batch(reward: LoadedReward, samples: Sequence[Sample], may_abstain: bool) -> list[Outcome]:
    try:
        with UserCode(reward.spec, samples):
            result = reward.call(samples)
            if inspect.isawaitable(result):
                result = run_to_end(_awaited(result))
        values = _values(result, reward, len(samples))
    except RewardError as error:
        return [error] * len(samples)
    found: list[Outcome] = []
    for position, (value, sample) in enumerate(zip(values, samples, strict=True)):
        what = f"Reward {reward.spec} on {sample.prompt.uid} (position {position} of {len(samples)})"
        found.append(None if value is None and may_abstain else _item(reward, value, what))
    return found


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _values(result: Any, reward: LoadedReward, count: int) -> list[Any]:
    """The list that a batched function returned: a list, tuple, array or tensor of `count` values."""
    is_array = type(result).__module__.partition(".")[0] in ("numpy", "torch") and bool(getattr(result, "shape", ()))
    if not (isinstance(result, list | tuple) or is_array):
        raise RewardContractError(
            f"Reward {reward.spec} returned {SHOWN.repr(result)} ({type(result).__name__}) for {count} samples; "
            f"expected a list of {count} values, one a sample."
        )
    values = list(result)
    if len(values) != count:
        raise RewardContractError(
            f"Reward {reward.spec} returned {len(values)} values for {count} samples: expected {count}, got "
            f"{len(values)}. Return one value a sample, in the samples' order."
        )
    return values


def _item(reward: LoadedReward, value: Any, what: str) -> Outcome:
    """An exception in a value's place is the error of that sample alone."""
    if isinstance(value, Exception):
        return RewardError(f"{what} failed: {type(value).__name__}: {value}")
    try:
        return components(value, what, skip_text=reward.contract is Contract.VERL_BATCH)
    except RewardContractError as error:
        return error


OWN_FILES = (__file__, contracts.__file__, loading.__file__)


class UserCode:
    """Turns what a reward function raises into a RewardError with the user's own traceback.

    SystemExit is caught too: a reward that calls `exit()` must not end the worker as if all were well.
    """

    def __init__(self, spec: str, samples: Sequence[Sample]) -> None:
        self.spec = spec
        self.samples = samples

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not isinstance(error, Exception | SystemExit):
            return
        while tb is not None and tb.tb_frame.f_code.co_filename in OWN_FILES:
            tb = tb.tb_next
        text = "".join(traceback.format_exception(error.with_traceback(tb), limit=-8))
        first = self.samples[0].prompt
        where = first.uid if len(self.samples) == 1 else f"{len(self.samples)} samples, the first {first.uid}"
        columns = ", ".join(map(repr, first.extra)) or "none"
        raise RewardError(
            f"Reward {self.spec} raised {type(error).__name__} on {where}: {error}\n"
            f"Columns in sample.prompt.extra: {columns}\n{text}"
        ) from error
