"""One entry of `data.*_files` to the files behind it: a file, a pattern, a folder, a hub name, a source.

Invariant: no Python that lies with the data is ever run, and two splits of a set are never mixed in silence.
"""

import glob
import json
import re
from pathlib import Path
from typing import Any

from ..errors import DataError
from .formats import READERS
from .sources import parse_source

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![A-Za-z])")
ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""JSON files that tell of a set and hold none of its rows."""
TABLES = (".parquet", ".arrow", ".jsonl", ".csv", ".json")


def expand(entry: str) -> list[str]:
    """Files of an entry in the order in which they are read; a source and a hub name stand for themselves.

    A folder is what `datasets`' `save_to_disk` wrote, or holds files of one form; a pattern (`data/train-*.parquet`)
    stands for its files by name. Raises DataError: nothing there, several splits or forms, or only a loading script.
    """
    if parse_source(entry) is not None:
        return [entry]
    path = Path(entry).expanduser()
    if path.is_dir():
        return [str(file) for file in _of_folder(path)]
    if glob.has_magic(entry) and not path.exists():
        found = sorted(file for file in glob.glob(str(path), recursive=True) if Path(file).is_file())
        if not found:
            raise DataError(f"{entry}: no file has a name of this pattern. Correct it in data.*_files.")
        return found
    if not path.exists() and HUB_NAME.fullmatch(entry) and path.suffix.lower() not in READERS:
        return [f"hub:{entry}"]
    return [entry]


def _of_folder(folder: Path) -> list[Path]:
    if folder.suffix.lower() in READERS:
        raise DataError(f"{folder}: is a folder with the name of a file; rename it or name the files in it.")
    if (folder / "state.json").is_file():
        return _saved(folder)
    if (folder / "dataset_dict.json").is_file():
        splits = [str(split) for split in _json(folder / "dataset_dict.json").get("splits", [])]
        if len(splits) != 1:
            told = ", ".join(str(folder / split) for split in splits)
            raise DataError(f"{folder}: holds the splits {', '.join(splits)}; name one of them: {told}.")
        return _saved(folder / splits[0])
    return _loose(folder)


def _saved(folder: Path) -> list[Path]:
    """The Arrow files that `save_to_disk` wrote, in its order."""
    state = _json(folder / "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{folder}: holds rows by an index; save it again after flatten_indices().")
    names = [entry.get("filename") for entry in state.get("_data_files", []) if isinstance(entry, dict)]
    files = [folder / name for name in names if isinstance(name, str) and Path(name).name == name]
    if not files or len(files) != len(names) or not all(file.is_file() for file in files):
        raise DataError(f"{folder}: state.json names data files that are not all there; save or copy the set again.")
    return files


def _loose(folder: Path) -> list[Path]:
    """All files of the one form below a folder, by name."""
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and file.name not in ABOUT and not file.relative_to(folder).as_posix().startswith(".")
    )
    of_form = {form: [file for file in files if file.suffix.lower() == form] for form in TABLES}
    forms = [form for form in TABLES[:-1] if of_form[form]] or [form for form in TABLES[-1:] if of_form[form]]
    if not forms:
        scripts = [file.name for file in files if file.suffix == ".py"]
        if scripts:
            raise DataError(
                f"{folder}: holds no data file, only Python ({scripts[0]}). Loading scripts are never run, whatever "
                "is set: run it yourself and save its rows as Parquet."
            )
        raise DataError(f"{folder}: holds no {', '.join(TABLES)} file. Correct the path in data.*_files.")
    if len(forms) > 1:
        raise DataError(f"{folder}: holds {' and '.join(forms)} files; name one form: {folder}/*{forms[0]}.")
    found = of_form[forms[0]]
    splits = sorted({split for file in found if (split := _split(file.relative_to(folder)))})
    if len(splits) > 1:
        pattern = f"{found[0].parent}/{splits[0]}*{forms[0]}"
        raise DataError(f"{folder}: holds the splits {', '.join(splits)}; name one by a pattern such as {pattern}.")
    return found


def _split(relative: Path) -> str | None:
    """The split that a file's name, or its folder's, begins with."""
    found = [match[1] for part in relative.parts if (match := SPLIT.match(part))]
    return found[-1] if found else None


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {error}. Save or copy the set again.") from error
    if not isinstance(value, dict):
        raise DataError(f"{file}: is no JSON object. Save or copy the set again.")
    return value
