"""The tests that need vLLM, run where it is installed: in the environment of `make vllm-env`."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from .conftest import HAS_VLLM

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / os.environ.get("VLLM_VENV", ".venv-vllm") / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed in this environment: its tests run here by themselves")
def test_the_contract_holds_for_vllm_in_its_own_environment() -> None:
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}: make vllm-env installs vLLM's CPU build into it")
    command = [str(PYTHON), "-m", "pytest", "-q", "-k", "vllm", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    counted = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and counted is not None, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(counted[1]) > 20  # the suite ran, and was not skipped
