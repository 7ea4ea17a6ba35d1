"""The tests can tell a kept promise from a broken one: a few mutants here, all by `python -m tests.chaos mutants`."""

from pathlib import Path

import pytest

from .mutants import MUTANTS, Mutant, survives, unfit


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_fits_the_sources(mutant: Mutant) -> None:
    assert unfit(mutant) == ""


@pytest.mark.slow
@pytest.mark.mutation
@pytest.mark.parametrize("mutant", MUTANTS[:3], ids=lambda mutant: mutant.name)
def test_a_broken_promise_turns_the_suite_red(mutant: Mutant, tmp_path: Path) -> None:
    assert survives(mutant, tmp_path) == ""


def test_a_mutant_that_does_not_fit_is_an_error() -> None:
    stale = Mutant(name="stale", file="infra/files.py", old="never written", new="", tests=())
    assert "0 times" in unfit(stale)
