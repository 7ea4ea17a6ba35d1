"""The forms in which a reward function may be written, and what each is called with.

    sample      f(sample, **kwargs) -> number or dict
    samples     f(samples, **kwargs) -> list of them, one a sample
    verl        compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs) -> number or dict
    verl-batch  compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs) -> list
    trl         reward(prompts, completions, <column>, …, **kwargs) -> list of numbers

Invariant: the form follows from the signature alone, or from the config, never from a sample.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from ..errors import RewardError
from ..types import Prompt, Sample


class Contract(StrEnum):
    """How a reward function is called."""

    SAMPLE = "sample"
    SAMPLES = "samples"
    VERL = "verl"
    VERL_BATCH = "verl-batch"
    TRL = "trl"

    @property
    def batched(self) -> bool:
        """One call grades all samples, and returns a list."""
        return self in (Contract.SAMPLES, Contract.VERL_BATCH, Contract.TRL)


GIVEN = {
    Contract.SAMPLE: ("sample",),
    Contract.SAMPLES: ("samples",),
    Contract.VERL: ("data_source", "solution_str", "ground_truth", "extra_info"),
    Contract.VERL_BATCH: ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
    Contract.TRL: ("prompts", "completions"),
}


def signature_of(function: Any, spec: str) -> inspect.Signature:
    """Raises RewardError where Python cannot tell, as for some functions written in C."""
    try:
        return inspect.signature(function)
    except ValueError as error:
        raise RewardError(f"{spec}: its signature cannot be read; wrap it in def name(sample) -> float.") from error


def detect(signature: inspect.Signature) -> Contract:
    """The form that a signature shows.

    By the parameters' names, in this order: `solution_strs`, `solution_str`, `completions` (or nothing but keywords),
    a first one called `samples` or annotated as a list or sequence; else one sample.
    """
    parameters = signature.parameters
    if "solution_strs" in parameters:
        return Contract.VERL_BATCH
    if "solution_str" in parameters:
        return Contract.VERL
    first = next(iter(parameters.values()), None)
    if "completions" in parameters or (first is not None and first.kind is first.VAR_KEYWORD):
        return Contract.TRL
    annotation = str(getattr(first, "annotation", "")).lower()
    is_list = annotation.removeprefix("collections.abc.").removeprefix("typing.").startswith(("list[", "sequence["))
    if first is not None and (first.name == "samples" or is_list):
        return Contract.SAMPLES
    return Contract.SAMPLE


def check_signature(signature: inspect.Signature, contract: Contract, spec: str, kwargs: Mapping[str, Any]) -> None:
    """Raises RewardError where the function cannot be called so; TRL's columns are known with the data only."""
    parameters = signature.parameters.values()
    by_keyword = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    given: dict[str, Any] = dict(kwargs)
    if contract is Contract.TRL:
        unknown = [] if takes_all else [name for name in kwargs if name not in by_keyword]
        problem = f"no parameter {unknown[0]!r}" if unknown else ""
    else:
        positional: tuple[object, ...] = ()
        if contract in (Contract.SAMPLE, Contract.SAMPLES):
            positional = (object(),)
        else:
            given |= {name: None for name in GIVEN[contract] if takes_all or name in by_keyword}
        problem = _unbound(signature, positional, given)
    if problem:
        names = ", ".join([*GIVEN[contract], *(f"{key}=…" for key in kwargs)])
        raise RewardError(
            f"{spec}: is called as ({names}), but its signature is {signature}: {problem}. "
            f"It must take {_TAKES[contract]}; further arguments come from reward.kwargs."
        )


_TAKES = {
    Contract.SAMPLE: "one sample",
    Contract.SAMPLES: "a list of samples",
    Contract.VERL: "data_source, solution_str, ground_truth and extra_info",
    Contract.VERL_BATCH: "data_sources, solution_strs, ground_truths and extra_infos",
    Contract.TRL: "completions and columns of the data",
}


def _unbound(signature: inspect.Signature, positional: tuple[object, ...], given: Mapping[str, Any]) -> str:
    try:
        signature.bind(*positional, **given)
    except TypeError as error:
        return str(error)
    return ""


def call(
    function: Callable[..., Any],
    signature: inspect.Signature,
    contract: Contract,
    kwargs: Mapping[str, Any],
    samples: Sequence[Sample],
) -> Any:
    """The function's own result, not yet checked and perhaps to be awaited; one sample where it is not batched."""
    if contract is Contract.SAMPLE:
        (sample,) = samples
        return function(sample, **kwargs)
    if contract is Contract.SAMPLES:
        return function(list(samples), **kwargs)
    if contract is Contract.TRL:
        given = _trl_arguments(samples)
    else:
        rows = [_verl_values(sample) for sample in samples]
        columns = zip(*rows, strict=True) if contract is Contract.VERL_BATCH else rows[0]
        values = [list(column) for column in columns] if contract is Contract.VERL_BATCH else list(columns)
        given = dict(zip(GIVEN[contract], values, strict=True))
    return function(**accepted(signature, given | dict(kwargs)))


def accepted(signature: inspect.Signature, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those that the function has a parameter for."""
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(given)
    return {name: value for name, value in given.items() if name in signature.parameters}


def missing_columns(signature: inspect.Signature, kwargs: Mapping[str, Any], prompts: Sequence[Prompt]) -> list[str]:
    """Parameters without a default that are neither columns of these prompts nor arguments of the config."""
    known = {"prompts", "completions", *kwargs, *columns_of(prompts)}
    return [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.default is parameter.empty
        and parameter.name not in known
    ]


def columns_of(prompts: Sequence[Prompt]) -> list[str]:
    """Names of the columns that a TRL reward may take: those of the rows, and `answer` under that name too."""
    names = dict.fromkeys(name for prompt in prompts for name in (prompt.answer_column, *prompt.extra))
    return list(names | {"answer": None})


def _trl_arguments(samples: Sequence[Sample]) -> dict[str, Any]:
    """Prompts and completions as turns where the row held turns, else as text; each column, one value a sample."""
    prompts = [sample.prompt for sample in samples]
    columns = {name: [_column_value(prompt, name) for prompt in prompts] for name in columns_of(prompts)}
    return columns | {
        "prompts": [[dict(turn) for turn in p.messages] if p.chat else p.text for p in prompts],
        "completions": [
            [{"role": "assistant", "content": sample.response}] if sample.prompt.chat else sample.response
            for sample in samples
        ],
    }


def _column_value(prompt: Prompt, name: str) -> Any:
    """None where this row lacks what another of the call has, as in a table."""
    if name in prompt.extra:
        return prompt.extra[name]
    return prompt.answer if name in (prompt.answer_column, "answer") else None


def _verl_values(sample: Sample) -> tuple[Any, str, Any, dict[str, Any]]:
    """verl's four values; rows without its column `extra_info` give all their further columns there."""
    extra = sample.prompt.extra
    own = extra.get("extra_info", extra)
    info = dict(own) if isinstance(own, Mapping) else {}
    return sample.prompt.source, sample.response, sample.prompt.answer, info
