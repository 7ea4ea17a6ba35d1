"""Ranks under Ray: they meet without a race for a port, and a rank that is lost or hangs ends the wait of all."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from moonshift.core.batch import Batch
from moonshift.core.config import load_config
from moonshift.core.errors import StorageError, WorkerLostError
from moonshift.core.plan import make_plan
from moonshift.core.types import SamplingParams
from moonshift.infra.cluster import cluster
from moonshift.infra.recovery import MEMORY_BUDGET
from moonshift.infra.roles import Role, Roles
from moonshift.infra.workers import stacks
from moonshift.infra.workers.group import WorkerGroup
from moonshift.infra.workers.handle import WorkerHandle
from moonshift.infra.workers.orders import RolloutOrder

from ..training_ranks import PROMPTS, ROOT, SETTINGS

pytestmark = pytest.mark.slow
CONFIG = load_config(None, (), environ={}, code=SETTINGS | {"trainer.n_gpus_per_node": 2}).config
Notes = list[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module", autouse=True)
def local_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOONSHIFT_HOME", str(tmp_path_factory.mktemp("home")))
        with cluster(120):
            yield


@pytest.fixture
def notes() -> Notes:
    return []


@pytest.fixture
def roles(char_llama: Path, notes: Notes) -> Iterator[Roles]:
    """Two ranks of the model worker, loaded."""
    made = Roles(CONFIG, make_plan(CONFIG, 100), lambda kind, detail: notes.append((kind, detail)))
    try:
        assert made.model.load(str(char_llama), None) == 0
        made.set_deadline(60)
        yield made
    finally:
        made.stop()


def order(max_new_tokens: int = 6) -> RolloutOrder:
    params = SamplingParams(n=4, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=max_new_tokens, stop_ids=(1,))
    return RolloutOrder(
        prompt_ids=PROMPTS, uids=[str(n) for n in range(4)], epochs=[0] * 4, seeds=list(range(16)), params=params
    )


def ranks() -> list[psutil.Process]:
    """The model workers of this process's cluster; other tests' ended processes may still be children too."""
    found = psutil.Process().children(recursive=True)
    living = [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    return [process for process in living if "ray::ModelWorker" in "".join(process.cmdline())]


def test_two_ranks_share_a_rollout_and_one_folder_comes_of_it(roles: Roles, tmp_path: Path) -> None:
    metrics = roles.model.rollout(order(), str(tmp_path / "rollout"))
    batch = Batch.load(tmp_path / "rollout")
    assert batch.rows("uid") == [str(prompt) for prompt in range(4) for _ in range(4)]
    assert [row.tolist() for row in batch.rows("prompt_ids")] == [ids for ids in PROMPTS for _ in range(4)]
    assert metrics["response_length/total"] == len(batch.ragged("response_ids").values)
    roles.model.log_probs(str(tmp_path / "rollout"), str(tmp_path / "log_probs"))
    assert len(Batch.load(tmp_path / "log_probs")) == 16
    (tmp_path / "saved").mkdir()
    roles.model.save(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "optimizer.safetensors").is_file()
    assert len(roles.model.weights_sha256()) == 64


@pytest.mark.case("X02")
def test_a_rank_that_dies_ends_the_call_of_all(roles: Roles, notes: Notes, tmp_path: Path) -> None:
    roles.model.rollout(order(), str(tmp_path / "rollout"))
    first, second = ranks()
    second.send_signal(signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"log_probs of role actor_rollout, rank . of 2 ended because its worker"):
        roles.model.log_probs(str(tmp_path / "rollout"), str(tmp_path / "log_probs"))
    assert time.monotonic() - started < 30
    assert [kind for kind, _ in notes] == ["worker_lost"]
    with pytest.raises(WorkerLostError, match="no whole group"):
        roles.model.rollout(order(), str(tmp_path / "again"))
    roles.stop()
    first.wait(10)


def test_a_rank_that_hangs_in_a_collective_is_found_and_all_stacks_are_noted(
    roles: Roles, notes: Notes, tmp_path: Path
) -> None:
    """R10: the other rank waits for it within the collective, and its stack says so."""
    roles.model.rollout(order(), str(tmp_path / "rollout"))
    stopped = ranks()
    stopped[1].send_signal(signal.SIGSTOP)
    roles.set_deadline(4)
    with pytest.raises(WorkerLostError, match=r"rank 0 and 1 of 2 did not answer within 4 s"):
        roles.model.log_probs(str(tmp_path / "rollout"), str(tmp_path / "log_probs"))
    ((kind, detail),) = notes
    assert kind == "worker_lost"
    assert "rank 0:" in detail["stack"] and "rank 1:" in detail["stack"]
    assert "torch/distributed" in detail["stack"] and "log_probs" in detail["stack"]
    roles.stop()
    psutil.wait_procs(stopped, 10)
    assert ranks() == []


@ray.remote(num_cpus=0)
class Rank:
    """A rank that does as it is told, one word for each rank."""

    def __init__(self, rank: int, folder: str) -> None:
        self.rank = rank
        self.folder = Path(folder)

    def identify(self) -> int:
        return stacks.enable(self.folder)

    def open_store(self) -> int:
        return 1

    def join(self, address: int) -> None:
        assert address == 1

    def act(self, words: list[str]) -> str:
        match words[self.rank]:
            case "disk full":
                raise StorageError("no space left")
            case "memory":
                raise WorkerLostError("The memory of this rank ran out (actor)")
            case "cut off":
                raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
            case "waits":
                time.sleep(600)
        return words[self.rank]


def group_of(folder: Path, notes: Notes) -> WorkerGroup:
    def note(kind: str, detail: dict[str, Any]) -> None:
        notes.append((kind, detail))

    actors = [Rank.remote(rank, str(folder)) for rank in range(2)]
    return WorkerGroup([WorkerHandle(actor, Role.ACTOR_ROLLOUT, CONFIG, note) for actor in actors], note, 60)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["disk full", "fine"], StorageError, "no space left"),
        (["cut off", "disk full"], StorageError, "no space left"),
        (["disk full", "waits"], StorageError, "no space left"),
        (["waits", "memory"], WorkerLostError, "memory of this rank"),
        (["cut off", "cut off"], WorkerLostError, "cut off from the others"),
    ],
)
def test_the_error_of_a_group_is_the_one_that_explains_the_others(
    tmp_path: Path, notes: Notes, words: list[str], error: type[Exception], message: str
) -> None:
    group = group_of(tmp_path, notes)
    try:
        assert group.call("act", ["a", "b"]) == ["a", "b"]
        with pytest.raises(error, match=message):
            group.call("act", words)
        assert [kind for kind, _ in notes] == (["worker_lost"] if error is WorkerLostError else [])
        if words[1] == "fine":
            assert group.call("act", ["a", "b"]) == ["a", "b"]  # nobody was left waiting
        elif "waits" in words:
            with pytest.raises(WorkerLostError, match="no whole group"):
                group.call("act", ["a", "b"])
    finally:
        group.kill()


def test_what_a_rank_learned_of_its_memory_is_kept_for_its_successor(
    roles: Roles, notes: Notes, char_llama: Path, tmp_path: Path
) -> None:
    """One that is lost takes nothing along: the ranks that live are asked how far their passes are cut."""
    roles.model.load(str(char_llama), None, None, {"actor": 4, "log_prob": 2})
    roles.model.rollout(order(), str(tmp_path / "rollout"))
    ranks()[1].send_signal(signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        roles.model.log_probs(str(tmp_path / "rollout"), str(tmp_path / "log_probs"))
    found = [(detail["what"], detail["divisor"]) for kind, detail in notes if kind == MEMORY_BUDGET]
    assert sorted(found) == [("actor", 4), ("log_prob", 2)]


STORES = """
import sys
from moonshift.infra.workers.process_group import open_store
from torch.distributed import TCPStore
print("ready", flush=True)
for _ in sys.stdin:
    store = open_store("127.0.0.1", 30)
    TCPStore("127.0.0.1", store.port, is_master=False).set("key", str(store.port))
    print(store.port, store.get("key").decode(), flush=True)
"""


@pytest.mark.case("X03")
def test_groups_that_start_at_once_never_get_one_port() -> None:
    """8 stores at once, 20 times, while strangers listen on ports that were theirs before."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", STORES], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    strangers: list[socket.socket] = []
    try:
        assert [_line(process) for process in started] == ["ready"] * 8
        for _ in range(20):
            for process in started:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            told = [_line(process).split() for process in started]
            ports = {int(port) for port, _ in told}
            assert len(ports) == 8 and all(port == seen for port, seen in told)
            for port in ports:
                with suppress(OSError):  # still held
                    strangers.append(socket.create_server(("127.0.0.1", port)))
        for process in started:
            process.communicate(timeout=60)
        assert [process.returncode for process in started] == [0] * 8
    finally:
        for process in started:
            process.kill()
        for stranger in strangers:
            stranger.close()


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
