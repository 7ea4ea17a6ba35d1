"""How much a run's checkpoints will take on the disk, so that a disk too small is known before the first step."""

import shutil
from pathlib import Path

from moonshift.core.config.schema import Config
from moonshift.core.plan.memory import adapter_parameters, optimizer_numbers
from moonshift.core.plan.model_shape import read_shape

_FLOAT32 = 4
"""bytes of a weight, and of a number of the optimizer's state"""


def checkpoint_bytes(config: Config, model: Path, critic: Path | None) -> int | None:
    """Bytes of one checkpoint: the policy and, where there is one, the critic; None where their sizes are not known."""
    folders = [model, *([critic or model] if config.needs_critic else [])]
    shapes = [read_shape(folder) for folder in folders]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    adapter = adapter_parameters(config.actor_rollout_ref.model, known[0])
    numbers = sum(shape.parameters for shape in known) + adapter  # it is written beside the merged weights
    numbers += optimizer_numbers(config.actor_rollout_ref.actor.optim, known[0], adapter)
    numbers += sum(optimizer_numbers(config.critic.optim, shape, 0) for shape in known[1:])
    return numbers * _FLOAT32


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
