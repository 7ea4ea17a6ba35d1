"""How much a run's checkpoints will take on the disk, so that a disk too small is known before the first step."""

import shutil
from pathlib import Path

from moonshift.core.config.schema import Config
from moonshift.core.plan.memory import adapter_parameters
from moonshift.core.plan.model_shape import read_shape

_WEIGHT, _MOMENTS = 4, 2 * 4
"""bytes a parameter: float32 weights, and AdamW's two float32 moments"""


def checkpoint_bytes(config: Config, model: Path, critic: Path | None) -> int | None:
    """Bytes of one checkpoint: the policy and, where there is one, the critic; None where their sizes are not known."""
    folders = [model, *([critic or model] if config.needs_critic else [])]
    shapes = [read_shape(folder) for folder in folders]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    total = sum(shape.parameters for shape in known) * (_WEIGHT + _MOMENTS)
    adapter = adapter_parameters(config.actor_rollout_ref.model, known[0])
    if adapter:  # it is written beside the merged weights, and only it has moments
        total += adapter * (_WEIGHT + _MOMENTS) - known[0].parameters * _MOMENTS
    return total


def disk_warning(config: Config, one: int | None, folder: Path) -> str | None:
    """What to say where `folder`'s disk has no room for checkpoints of `one` byte count each; None where it has.

    One more is counted than is kept: the oldest is deleted only after the newest has been verified.
    """
    count = config.checkpoint.keep + 1
    free = shutil.disk_usage(folder).free
    if one is None or one * count <= free:
        return None
    return (
        f"{folder} has {free / 2**30:.2f} GiB free, and the checkpoints may take {one * count / 2**30:.2f} GiB "
        f"(checkpoint.keep={config.checkpoint.keep}, and one more while it is written, of {one / 2**30:.2f} GiB each). "
        "Lower checkpoint.keep, free some space, or choose another folder with MOONSHIFT_HOME; a full disk pauses the "
        "run."
    )
