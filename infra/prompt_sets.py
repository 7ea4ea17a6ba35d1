"""The prompts of a run: read, rendered and made to fit, with what became of every row.

Invariant: used + dropped + left out = rows, for each set; no prompt of a set is longer than `data.max_prompt_length`.
"""

import gc
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from moonshift.core.config.schema import Config, DataSection
from moonshift.core.datasets.mixture import Mixture
from moonshift.core.datasets.reading import Progress, ReadPrompts, read_prompts, refuse_dropped, silent
from moonshift.core.datasets.report import OVERLONG, DataReport, DroppedRow, RolePattern
from moonshift.core.datasets.rows import Columns
from moonshift.core.datasets.sampler import PromptSampler
from moonshift.core.datasets.token_rows import TokenRows
from moonshift.core.training.rendering import Renderer, RenderFault, refuse_faults, refuse_overlong
from moonshift.core.types import Prompt

from . import token_cache

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts and their token ids, row by row."""

    prompts: list[Prompt]
    ids: TokenRows
    entries: tuple[int, ...]
    """for each prompt the place of its entry in `data.*_files`"""
    report: DataReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSet:
    """A set as its files have it."""

    name: str
    read: ReadPrompts
    left_out: int


def read_sets(config: Config, progress: Progress = silent) -> tuple[ReadSet, ReadSet, ReadSet]:
    """Training prompts, held-out prompts and worked examples. Raises DataError as `read_prompts` does."""
    data = config.data
    with _collecting_later():
        return (
            _read("train", data.train_files, data, progress),
            _read("validation", data.val_files, data, progress),
            _read("examples", config.warm_start.files, data, progress),
        )


def refuse_bad_rows(config: Config, sets: Sequence[ReadSet]) -> None:
    """Raise DataError where rows cannot be used and are not to be skipped."""
    if config.data.on_bad_row == "error":
        for item in sets:
            refuse_dropped(item.read.dropped, item.read.num_rows)


def render_set(
    item: ReadSet, renderer: Renderer, data: DataSection, *, strict: bool, progress: Progress = silent
) -> PromptSet:
    """Ids of every prompt, by the policy of `data.on_bad_row` and `data.on_overlong`.

    With `strict` what those keys call an error is raised as DataError; without, it is reported as dropped.
    """
    prompts = item.read.prompts
    digest, duplicates = _content(prompts)
    ids, faults = _rendered(prompts, renderer, digest, item.name, progress)
    found = [fault for fault in faults if fault]
    if strict and data.on_bad_row == "error":
        refuse_faults(found, len(prompts))
    whole = np.array([fault is None for fault in faults], dtype=bool)
    dropped = [_as_dropped(fault.uid, fault.reason, fault.kind, item.read, data) for fault in found]
    prompts, ids = _only(prompts, whole), ids.kept(whole)
    entries = _only(item.read.entries, whole)
    long = ids.lengths > data.max_prompt_length
    if strict and data.on_overlong == "error":
        refuse_overlong([prompt.uid for prompt in prompts], ids, data.max_prompt_length)
    truncated = 0
    if data.on_overlong in ("left", "right"):
        truncated = int(long.sum())
        ids = ids.cut(data.max_prompt_length, "left" if data.on_overlong == "left" else "right")
    else:
        dropped += [
            _too_long(prompts[place], int(ids.lengths[place]), item.read, data) for place in np.flatnonzero(long)
        ]
        prompts, entries, ids = _only(prompts, ~long), _only(entries, ~long), ids.kept(~long)
    report = DataReport(
        name=item.name,
        rows=item.read.num_rows + item.left_out,
        used=len(prompts),
        left_out=item.left_out,
        dropped=(*item.read.dropped, *dropped),
        truncated=truncated,
        duplicates=duplicates,
        lengths=ids.lengths,
        patterns=_patterns(item.read.prompts, renderer),
        sources=dict(Counter(prompt.source for prompt in prompts)),
        digest=digest,
    )
    return PromptSet(prompts=prompts, ids=ids, entries=tuple(entries), report=report)


def sampler(config: Config, train: PromptSet) -> PromptSampler:
    """Which prompts each step draws. Raises DataError: a batch larger than the set, or weights that do not fit it."""
    data = config.data
    seed = config.run.seed if data.seed is None else data.seed
    mixture = None
    if data.train_weights:
        counts = Counter(train.entries)
        sizes = tuple(counts[place] for place in range(len(data.train_files)))
        mixture = Mixture(sizes=sizes, weights=data.train_weights, seed=seed, shuffle=data.shuffle)
    return PromptSampler(
        num_rows=len(train.prompts),
        batch_size=data.train_batch_size,
        seed=seed,
        shuffle=data.shuffle,
        mixture=mixture,
    )


def _read(name: str, files: Sequence[str], data: DataSection, progress: Progress) -> ReadSet:
    columns = Columns(
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        source_key=data.source_key,
        system_prompt=data.system_prompt,
    )
    read = read_prompts(files, columns, progress)
    most = data.val_max_samples if name == "validation" else None
    left_out = 0 if most is None else max(0, len(read.prompts) - most)
    if left_out:
        read = replace(read, prompts=read.prompts[:most], entries=read.entries[:most])
    return ReadSet(name=name, read=read, left_out=left_out)


def _content(prompts: Sequence[Prompt]) -> tuple[str, int]:
    """SHA-256 of uids, turns and answers, and how many prompts have the turns of an earlier one."""
    digest, seen = hashlib.sha256(), set()
    for prompt in prompts:
        turns = json.dumps(prompt.messages).encode()
        digest.update(json.dumps([prompt.uid, prompt.answer]).encode() + turns + b"\n")
        seen.add(hashlib.blake2b(turns, digest_size=16).digest())
    return digest.hexdigest(), len(prompts) - len(seen)


def _rendered(
    prompts: Sequence[Prompt], renderer: Renderer, digest: str, name: str, progress: Progress
) -> tuple[TokenRows, list[RenderFault | None]]:
    """Ids and faults, row by row: those kept from an earlier start, or made now and kept."""
    if not prompts:
        return TokenRows.of([]), []
    kept_as = token_cache.key(renderer, digest)
    found = token_cache.load(kept_as) if kept_as else None
    what = f"tokens of {name}"
    if found is not None and len(found[0]) == len(prompts):
        progress(what, len(prompts), len(prompts))
        return found
    parts: list[TokenRows] = []
    faults: list[RenderFault | None] = []
    with _collecting_later():
        for rows in renderer.chunks(prompts):
            faults += [row if isinstance(row, RenderFault) else None for row in rows]
            parts.append(TokenRows.of([] if isinstance(row, RenderFault) else row for row in rows))
            progress(what, len(faults), len(prompts))
    ids = TokenRows.joined(parts)
    if kept_as:
        token_cache.store(kept_as, ids, faults)
    return ids, faults


@contextmanager
def _collecting_later() -> Iterator[None]:
    """No search for cycles while millions of objects are made that stay: it took a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _patterns(prompts: Sequence[Prompt], renderer: Renderer) -> tuple[RolePattern, ...]:
    """Each sequence of roles with its first prompt as the model reads it, most frequent first."""
    counts: Counter[tuple[str, ...]] = Counter()
    first: dict[tuple[str, ...], Prompt] = {}
    for prompt in prompts:
        roles = tuple(turn["role"] for turn in prompt.messages)
        counts[roles] += 1
        first.setdefault(roles, prompt)
    patterns = []
    for roles, rows in counts.most_common():
        text = renderer.text(first[roles])
        rendered = text if isinstance(text, str) else None
        patterns.append(RolePattern(roles=roles, rows=rows, uid=first[roles].uid, rendered=rendered))
    return tuple(patterns)


def _too_long(prompt: Prompt, length: int, read: ReadPrompts, data: DataSection) -> DroppedRow:
    return _as_dropped(prompt.uid, f"{length} tokens, {data.max_prompt_length} allowed", OVERLONG, read, data)


def _as_dropped(uid: str, fault: str, kind: str, read: ReadPrompts, data: DataSection) -> DroppedRow:
    label, _, row = uid.rpartition(":")
    return DroppedRow(file=read.files[label], row=int(row), column=data.prompt_key, kind=kind, fault=fault)


def _only(items: Sequence[Item], kept: np.ndarray) -> list[Item]:
    return [item for item, keep in zip(items, kept.tolist(), strict=True) if keep]
