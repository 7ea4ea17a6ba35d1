"""The random generators of a worker's process: started from the run's seed, written and read with a checkpoint."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

_FILE = "rng.safetensors"


def seed_generators(seed: int) -> None:
    """Start every generator of the process from the run's seed: a checkpoint's bytes depend on nothing else."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_generators(folder: Path, device: torch.device) -> dict[str, Any]:
    """Write torch's states to `folder`; returns those of Python and NumPy, as JSON values."""
    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    save_file(states, folder / _FILE)
    name, words, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python_random": random.getstate(),
        "numpy_random": [name, np.asarray(words).tolist(), position, has_gauss, cached],
    }


def restore_generators(folder: Path, saved: dict[str, Any], device: torch.device) -> None:
    """Inverse of `save_generators`; a checkpoint of another kind of device lacks the GPU's state."""
    states = load_file(folder / _FILE)
    torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"])
    version, words, gauss = saved["python_random"]
    random.setstate((version, tuple(words), gauss))
    name, words, position, has_gauss, cached = saved["numpy_random"]
    np.random.set_state((name, np.array(words, dtype=np.uint32), position, has_gauss, cached))
