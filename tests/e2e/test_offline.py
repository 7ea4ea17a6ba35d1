"""Nothing leaves loopback: every connect() of every process of a run is read off the kernel."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parent.parent.parent / "examples" / "quickstart.yaml"
SMALL = (
    "warm_start.steps=2",
    "trainer.total_training_steps=1",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "data.val_max_samples=8",
)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: apt-get install strace")
def test_no_socket_leaves_loopback_during_a_run(tmp_path: Path) -> None:
    trace = tmp_path / "connects"
    environment = {**os.environ, "MOONSHIFT_HOME": str(tmp_path / "home")}
    environment.pop("PREFECT_API_URL", None)
    done = subprocess.run(
        ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=connect,sendto", "-e", "signal=none", "-o", str(trace),
         sys.executable, "-m", "moonshift.flows.cli", "train", str(QUICKSTART), *SMALL, "--plain"],
        env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = trace.read_text(errors="replace")
    addresses = set(re.findall(r'inet_addr\("([^"]+)"\)|inet_pton\(AF_INET6, "([^"]+)"', text))
    found = {four or six for four, six in addresses}
    assert found, "no connection was seen at all: the trace does not work"
    outside = {a for a in found if not a.startswith("127.") and a not in ("::1", "0.0.0.0", "::ffff:127.0.0.1")}
    assert outside == set()
