"""Checkpoints on disk: `checkpoints/step-000010/` with a manifest written last, verified by hash before use.

Layout: `model/` (a Hugging Face folder that loads anywhere), `optimizer.safetensors`, `rng.safetensors`,
`state.json` and `manifest.json`. Invariant: a folder counts as a checkpoint only if its manifest names every file with
the right size and SHA-256; which checkpoints exist is read from the disk, never from memory. Loading runs no code.
"""

import json
import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from moonshift.core.errors import CheckpointError

from .files import discard, files_below, sha256_file, write_text

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
FORMAT = 1
PICKLED = (".pt", ".pth", ".pkl", ".pickle", ".ckpt")
"""Endings of files that run code when they are loaded; a checkpoint of ours has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    """policy version: so many steps have been applied"""
    identity: str
    """hash of the config's mathematics"""
    files: dict[str, dict[str, int | str]]
    """relative path → {bytes, sha256}"""
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.files.values())


def folder_of(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return checkpoints / f"step-{step:06d}"


def seal(folder: Path, *, step: int, identity: str) -> Manifest:
    """Write the manifest over all files of a folder: the last file of a checkpoint."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in files_below(folder)
    }
    manifest = Manifest(step=step, identity=identity, files=files)
    write_text(folder / MANIFEST, json.dumps(asdict(manifest), indent=1, sort_keys=True))
    return manifest


def verify(folder: Path) -> Manifest:
    """Check every file of a checkpoint against its manifest.

    Raises:
        CheckpointError: naming the first file that is missing, too short or changed, or a pickle.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it was never finished.")
    try:
        manifest = Manifest(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.format}; this version reads format {FORMAT}.")
    for file in files_below(folder):
        if file.suffix in PICKLED:
            raise CheckpointError(f"{file} is a pickle, which can run any code when it is read; it is not read.")
    for name, entry in manifest.files.items():
        _check_file(folder, name, entry)
    return manifest


def _check_file(folder: Path, name: str, entry: dict[str, int | str]) -> None:
    file = folder / name
    if not file.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{folder / MANIFEST} names {name}, which lies outside the checkpoint.")
    if not file.is_file():
        raise CheckpointError(f"{file} is missing.")
    if file.stat().st_size != entry["bytes"]:
        raise CheckpointError(f"{file} has {file.stat().st_size} bytes, the manifest says {entry['bytes']}.")
    if sha256_file(file) != entry["sha256"]:
        raise CheckpointError(f"{file} has changed since it was written: its SHA-256 is not the manifest's.")


def steps_on_disk(checkpoints: Path) -> list[int]:
    """Steps of the folders that bear a checkpoint's name, oldest first, in numeric order."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in checkpoints.glob("step-*"))
    return sorted(int(match.group(1)) for match in names if match)


def newest(checkpoints: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint that verifies; each one passed over is logged with the reason."""
    for step in reversed(steps_on_disk(checkpoints)):
        folder = folder_of(checkpoints, step)
        try:
            return folder, verify(folder)
        except CheckpointError as error:
            log.warning("checkpoint passed over: %s", error)
    return None


def retire(checkpoints: Path, keep: int) -> list[int]:
    """Delete all but the newest `keep` checkpoints, once the newest has been verified; returns the deleted steps.

    A folder that cannot be deleted is left for the next time: cleaning up never stops a run.
    """
    steps = steps_on_disk(checkpoints)
    if len(steps) <= keep:
        return []
    verify(folder_of(checkpoints, steps[-1]))
    return [step for step in steps[:-keep] if discard(folder_of(checkpoints, step))]
