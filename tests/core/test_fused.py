"""Fused kernels are refused where they cannot run, before anything is trained without them in silence."""

import importlib.util
from pathlib import Path

import pytest
import torch

from moonshift.core.errors import ModelError
from moonshift.core.training.fused import use_liger
from moonshift.core.training.model import load_model


def test_liger_is_refused_without_a_gpu(char_llama: Path) -> None:
    with pytest.raises(ModelError, match=r"use_liger needs a GPU, and the model is on the cpu; set it to false"):
        use_liger(load_model(char_llama, device="cpu"), torch.device("cpu"))


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="Liger is installed here")
def test_liger_that_is_not_installed_is_named(char_llama: Path) -> None:
    with pytest.raises(ModelError, match=r"needs liger-kernel, which is not installed here"):
        use_liger(load_model(char_llama, device="cpu"), torch.device("cuda"))
