"""The reward `code_tests`: the program in a response, run against the prompt's tests in a box of its own each."""

import secrets

from moonshift.core.rewards.code import CodeTest, extract_code, read_tests, same_output, verdict, with_test
from moonshift.core.types import Sample

from .box import Box, run


def code_tests(
    sample: Sample,
    *,
    timeout_s: float = 5.0,
    memory_mib: int = 512,
    partial: bool = False,
    stop_at_first: bool = True,
    allow_weak: bool = False,
) -> dict[str, float]:
    """`score` 1 where every test passes; `passed`, the share of them; `has_code`, whether a code block was found.

    `timeout_s` is for each test; `reward.timeout_s` must be above all of a prompt's together. With `partial` the share
    is the score and every test is run; else the tests after the first that fails count as failed, unless
    `stop_at_first` is off.

    Raises:
        RewardError: the prompt has no tests, or no box can be built on this machine (see `allow_weak` in `Box`): the
            sample then has an error, not a score.
    """
    tests = read_tests(sample.prompt.answer, sample.prompt.uid)
    program = extract_code(sample.response)
    if program is None:
        return verdict(0, len(tests), has_code=False, partial=partial)
    box = Box(timeout_s=timeout_s, memory_mib=memory_mib, allow_weak=allow_weak)
    passed = 0
    for test in tests:
        if _passes(program, test, box):
            passed += 1
        elif stop_at_first and not partial:
            break
    return verdict(passed, len(tests), has_code=True, partial=partial)


def _passes(program: str, test: CodeTest, box: Box) -> bool:
    token = secrets.token_hex(16)
    outcome = run(with_test(program, test, token), test.input, box)
    if outcome.limit is not None or outcome.code != 0:
        return False
    if test.output is not None:
        return same_output(outcome.output, test.output)
    return outcome.output.rstrip("\n").rpartition("\n")[2] == token
