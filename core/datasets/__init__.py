"""Prompts from files, folders, the hub and procedural sources, checked before anything is started.

Invariant: every row becomes a Prompt or is named with the reason; none disappears.
"""

from collections.abc import Sequence

from ..errors import DataError
from ..types import Prompt
from .reading import read_prompts, refuse_dropped
from .rows import Columns
from .sampler import PromptSampler
from .seeds import sample_seed

__all__ = ["Columns", "PromptSampler", "load_prompts", "sample_seed"]


def load_prompts(
    files: Sequence[str],
    *,
    prompt_key: str,
    answer_key: str,
    system_prompt: str | None,
    source_key: str = "data_source",
) -> list[Prompt]:
    """All prompts of `files`, in order; a prompt's uid is `<file name or source>:<row>`.

    `files`: paths (.jsonl .json .csv .parquet .arrow), patterns, folders, hub names or sources (`sums:?max=99`,
    `reasoning_gym:TASK?size=500`). Two files with one name are told apart by as much of their paths as that needs. The
    plain schema (`prompt`, `answer`) and verl's (`prompt`, `reward_model.ground_truth`, `data_source`) are both read;
    every other column goes into `extra`.

    Raises DataError: no file or no row, a file that cannot be read, a missing column, or rows that cannot be used
    (how many, and the first five with row from 0, column and reason).
    """
    if not files:
        raise DataError("No data files are given. Set data.train_files to a list of files or sources.")
    columns = Columns(prompt_key=prompt_key, answer_key=answer_key, source_key=source_key, system_prompt=system_prompt)
    read = read_prompts(files, columns)
    refuse_dropped(read.dropped, read.num_rows)
    return read.prompts
