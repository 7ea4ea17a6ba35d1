"""Where Moonshift keeps its files: `MOONSHIFT_HOME`, or `.moonshift` in the working folder."""

import os
from pathlib import Path

from moonshift.core.errors import StorageError

from .files import storage_errors


def home() -> Path:
    """The folder of ledger, runs, models, services and MLflow's data, absolute; made if it is missing.

    Raises:
        StorageError: when it cannot be made or written.
    """
    folder = home_path()
    with storage_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise StorageError(f"{folder} is not a folder; point MOONSHIFT_HOME at one.") from error
    if not os.access(folder, os.W_OK):
        raise StorageError(f"{folder} cannot be written; point MOONSHIFT_HOME at a folder of yours.")
    return folder


def home_path() -> Path:
    """The same folder, whether it is there or not."""
    return Path(os.environ.get("MOONSHIFT_HOME") or ".moonshift").absolute()


def models_folder() -> Path:
    """Converted and built models."""
    return home() / "models"


def stacks_folder() -> Path:
    """Stacks of workers that did not answer."""
    return home() / "stacks"


def run_folder(run_id: str) -> Path:
    """Stages and checkpoints of one run."""
    return home() / "runs" / run_id


def ledger_url() -> str:
    """The ledger: `MOONSHIFT_LEDGER_URL`, or a SQLite file."""
    return os.environ.get("MOONSHIFT_LEDGER_URL") or f"sqlite:///{home() / 'ledger.db'}"
