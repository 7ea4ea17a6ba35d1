"""Models that come inside of Python packages."""

import importlib.metadata
from pathlib import Path

from ..errors import ModelError

INSTALL = "pip install 'moonshift[examples]'"


def packaged_gguf(package: str) -> Path:
    """The one GGUF file that an installed Python package holds.

    Raises ModelError when the package is missing or does not hold exactly one.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(
            f"model.path is package:{package}, but the package {package} is not installed; {INSTALL}, or name another "
            "model."
        ) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    present = [file for file in found if file.is_file()]
    if len(present) != 1:
        raise ModelError(f"The package {package} holds {len(present)} .gguf files; name the file itself in model.path.")
    return present[0]
