"""What a plan needs to know that only the disk tells: the number of prompts and the model's architecture.

Light on purpose: no torch, no model library, nothing is built, converted or written.
"""

from pathlib import Path

from moonshift.core.config.schema import Config
from moonshift.core.datasets.counting import count_rows
from moonshift.core.errors import DataError, ModelError
from moonshift.core.plan import ModelShape
from moonshift.core.plan.model_shape import read_shape, shape_of
from moonshift.core.training.char_llama_settings import config_values, read_settings

from .home import home_path


def known_prompts(config: Config) -> tuple[int | None, str]:
    """Rows of the training data; None and the reason where they cannot be counted here."""
    try:
        return count_rows(config.data.train_files), ""
    except DataError as error:
        return None, str(error)


def known_shape(config: Config) -> tuple[ModelShape | None, str]:
    """The model's architecture; None and the reason where it is not at hand.

    Raises:
        ModelError: for settings of the built-in model that are wrong.
    """
    model = config.actor_rollout_ref.model
    if model.path == "builtin:char-llama":
        return shape_of(config_values(read_settings(model.override_config))), ""
    folder = _folder(model.path)
    if folder is None:
        return None, f"the model {model.path} is not here yet, or not converted; it is at the first run"
    shape = read_shape(folder)
    return (shape, "") if shape else (None, f"{folder}/config.json does not say the model's sizes")


def _folder(path: str) -> Path | None:
    """The Hugging Face folder of a model that is in place already."""
    given = Path(path).expanduser()
    if given.is_dir():
        return given
    if path.startswith("package:") or given.suffix == ".gguf":
        return next(iter(sorted((home_path() / "models").glob(f"{_stem(path)}-*/"))), None)
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except ValueError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _stem(path: str) -> str:
    if not path.startswith("package:"):
        return Path(path).stem
    from moonshift.core.training.packages import packaged_gguf

    try:
        return packaged_gguf(path.removeprefix("package:")).stem
    except ModelError:
        return path.removeprefix("package:")
