"""Files that appear whole or not at all: written beside their place, flushed, then renamed into it."""

import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from moonshift.core.errors import MoonshiftError, StorageError

log = logging.getLogger(__name__)

_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space and start again with --resume",
    errno.EDQUOT: "the quota is used up: free some space and start again with --resume",
    errno.EROFS: "the file system is read-only: choose another folder with MOONSHIFT_HOME",
    errno.EACCES: "permission is denied: change the folder's owner or choose another with MOONSHIFT_HOME",
    errno.EPERM: "the operation is not permitted: choose another folder with MOONSHIFT_HOME",
}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into a StorageError that says what to do.

    Raises:
        StorageError: naming the path and the remedy; every other error passes through.
    """
    try:
        yield
    except Exception as error:
        refused = as_storage_error(error, path)
        if refused is None:
            raise
        raise refused from error


def as_storage_error(error: BaseException, path: Path) -> StorageError | None:
    """The operating system's refusal to write below `path` as an error that says what to do; None for anything else.

    Libraries written in Rust (safetensors) and SQLite give the reason in their text only.
    """
    if isinstance(error, MoonshiftError):
        return None
    text = str(error)
    number = error.errno if isinstance(error, OSError) and error.errno else None
    if number is None:
        named = re.search(r"\(os error (\d+)\)", text)
        full = "database or disk is full" in text
        number = int(named[1]) if named else errno.ENOSPC if full else None
    if number not in _ADVICE:
        return None
    free = shutil.disk_usage(_existing(path)).free
    place = getattr(error, "filename", None) or path
    return StorageError(f"Cannot write {place}: {_ADVICE[number]} ({free / 2**20:.0f} MiB free there).")


def _existing(path: Path) -> Path:
    return next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_below(folder: Path) -> list[Path]:
    """Every file below a folder, by its relative path in sorted order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def folder_digest(folder: Path) -> str:
    """SHA-256 over the relative names and bytes of all files below a folder, hex."""
    digest = hashlib.sha256()
    for path in files_below(folder):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replace a file's content in one rename, flushed to the disk."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            flush(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        flush(path.parent)


def publish(temporary: Path, place: Path, alone: AbstractContextManager[None] | None = None) -> None:
    """`rename` a folder into its place once all its bytes are on the disk; the name is flushed too."""
    with storage_errors(place):
        flush_below(temporary)
        rename(temporary, place, alone)
        flush(place.parent)


def rename(temporary: Path, place: Path, alone: AbstractContextManager[None] | None = None) -> None:
    """Rename a folder into its place, where it can be read but may not outlive the machine before it is flushed.

    What lay there uncommitted goes first. `alone`: entered while names change, and left as soon as they have.
    """
    with storage_errors(place):
        doomed = None
        with alone or nullcontext():
            if place.exists():
                doomed = put_aside(place)
            temporary.rename(place)
        if doomed is not None:
            shutil.rmtree(doomed)


def flush_below(folder: Path) -> None:
    """Wait until all that is in a folder, and its names, are on the disk; the folder's own name is its parent's."""
    with storage_errors(folder):
        for path in [*files_below(folder), *(path for path in folder.rglob("*") if path.is_dir()), folder]:
            flush(path)


def remove(folder: Path) -> None:
    """Delete a folder; it leaves its name at once, so that a half-deleted one is never taken for a whole one."""
    shutil.rmtree(put_aside(folder))


def put_aside(folder: Path) -> Path:
    """Rename what is to be deleted to what `clear_leftovers` deletes; returns where it lies now."""
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}.deleted")
    folder.rename(doomed)
    return doomed


def link_folder(source: Path, target: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Give every file below a folder a second name below `target`; copied where the file system has no hard links.

    `leave_out`: relative names. A linked file must never be written in place: it is the same file under both names.
    """
    for path in files_below(source):
        name = path.relative_to(source).as_posix()
        if name in leave_out:
            continue
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            place.hardlink_to(path)
        except FileNotFoundError:
            raise
        except OSError:  # another file system, or one without links: copying says what is truly wrong
            shutil.copyfile(path, place)


def move_into(source: Path, folder: Path) -> None:
    """Rename all that is in a folder into another one, and remove the emptied one; goes on where it was interrupted."""
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path in list(source.iterdir()):
            with suppress(FileNotFoundError):  # another process does the same
                path.rename(folder / path.name)
        for place in (folder, folder.parent):
            flush(place)
        with suppress(FileNotFoundError):
            source.rmdir()


def discard(folder: Path) -> bool:
    """`remove` what is not needed any more, whether that is possible or not: cleaning up never stops a run."""
    try:
        remove(folder)
    except OSError as error:
        log.warning("%s is not deleted, tried again next time: %s", folder, error)
        return False
    return True


def clear_leftovers(folder: Path) -> None:
    """Delete what a killed attempt left half-written or half-deleted in a folder.

    What cannot be deleted (in use on a network disk, say) is left for the next time: cleaning up never stops a run.
    """
    if folder.is_dir():
        for path in folder.glob(".*"):
            if path.suffix in (".tmp", ".deleted"):
                try:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                except OSError as error:
                    log.warning("%s is not deleted, tried again next time: %s", path, error)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear_folder(folder: Path) -> None:
    """Remove what is in a folder; the folder stays."""
    for path in folder.iterdir():
        remove(path) if path.is_dir() else path.unlink()
