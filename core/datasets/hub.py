"""Rows of a data set on the Hugging Face hub, through the optional package `datasets`.

Invariant: only tables are read; a set that brings a loading script is refused by the package and never run.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from .formats import plain

if TYPE_CHECKING:
    from .sources import SourceRows, SourceSpec

PARAMETERS = ("split", "config", "revision")


def hub_rows(spec: "SourceSpec") -> "SourceRows":
    """`hub:owner/name?split=train&config=main&revision=SHA`; the split is train where none is named.

    Raises DataError: the package is missing, the set is neither in the local cache nor to be reached, or it has no
    such split or config.
    """
    from .sources import SourceRows, refuse_unknown

    refuse_unknown(spec, spec.parameters, PARAMETERS)
    if not spec.task:
        raise DataError(f"{spec.text}: names no set; write hub:owner/name?split=train.")
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"{spec.text}: a hub name needs the package datasets (pip install 'moonshift[hub]'). "
            "Or name a file or folder that is on this machine."
        )
    return SourceRows(name=spec.task, rows=[plain(row) for row in _table(spec).to_pylist()])


def _table(spec: "SourceSpec") -> Any:
    """The Arrow table of a split."""
    import datasets

    given = spec.parameters
    bars = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        found: Any = datasets.load_dataset(
            spec.task, given.get("config"), split=given.get("split", "train"), revision=given.get("revision")
        )
        return found.with_format("arrow")[:]
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{spec.text}: there is no such file or folder here, and the hub's data set cannot be loaded: "
            f"{_short(error)} Look-ups are off unless HF_HUB_OFFLINE=0 and HF_DATASETS_OFFLINE=0 are set; a set that "
            "was downloaded before is found in the local cache."
        ) from error
    finally:
        if bars:
            datasets.enable_progress_bars()


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text.rstrip('.')}."
