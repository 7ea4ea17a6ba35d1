"""Reward processes that hang, crash, lie or are killed cost their own sample and leave nothing behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from moonshift.core.config.schema import RewardSection
from moonshift.core.errors import RewardError, StageError
from moonshift.core.rewards.graded import Graded
from moonshift.core.types import Prompt, Sample
from moonshift.infra.rewards import RewardPool
from moonshift.infra.rewards.wire import Distrust, packed_sample, unpacked_graded, unpacked_sample


def sample(response: str, number: int = 0, **extra: Any) -> Sample:
    text = f"p{number}"
    prompt = Prompt(
        uid=f"u{number}",
        messages=({"role": "user", "content": text},),
        text=text,
        answer=None,
        source="t",
        extra=extra,
    )
    return Sample(prompt=prompt, response=response, finish_reason="stop", response_tokens=1)


def samples(*responses: str) -> list[Sample]:
    return [sample(response, number) for number, response in enumerate(responses)]


@contextmanager
def pool(folder: Path, code: str, name: str = "r", **keys: Any) -> Iterator[RewardPool]:
    file = folder / "reward.py"
    file.write_text(code, encoding="utf-8")
    made = RewardPool(section(f"{file}:{name}", **keys), start_timeout_s=30)
    with made:
        yield made


def section(function: str, **keys: Any) -> RewardSection:
    return RewardSection.model_validate({"function": function, "processes_per_worker": 2, "timeout_s": 10.0} | keys)


def scores(graded: list[Graded]) -> list[float | None]:
    return [each.components["score"] if each.components else None for each in graded]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


HANGS = """
import os
def r(completions, **kw):
    out = []
    for c in completions:
        if c == 'HANG':
            open({marker!r}, 'a').write(f'{os.getpid()}\\n')
        while c == 'HANG': pass
        out.append(1.0)
    return out
"""
ALARM = """
import signal
def r(completions, **kw):
    signal.signal(signal.SIGALRM, lambda *a: None); signal.alarm(1); signal.alarm(0)
    return [1.0] * len(completions)
"""


@pytest.mark.case("R03")
def test_a_reward_may_use_signals_whatever_thread_asks(tmp_path: Path) -> None:
    found: list[list[Graded]] = []

    def work() -> None:
        with pool(tmp_path, ALARM) as made:
            found.append(made.grade(samples("a", "b", "c")))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert [scores(each) for each in found] == [[1.0, 1.0, 1.0]]


@pytest.mark.case("R04")
def test_a_batch_with_one_that_hangs_ends_within_twice_the_timeout(tmp_path: Path) -> None:
    marker = tmp_path / "pids"
    with pool(tmp_path, HANGS.replace("{marker!r}", repr(str(marker))), timeout_s=2.0) as made:
        started = time.monotonic()
        graded = made.grade(samples("a", "HANG", "b"))
        assert time.monotonic() - started < 4.0
    assert scores(graded) == [1.0, None, 1.0]
    assert "within 2 s" in str(graded[1].error) and "reward.timeout_s" in str(graded[1].error)
    hung = [int(line) for line in marker.read_text().split()]
    assert hung and not any(map(lives, hung))


@pytest.mark.slow
@pytest.mark.case("R04")
def test_twenty_batches_that_hang_leave_as_many_processes_as_one(tmp_path: Path) -> None:
    with pool(tmp_path, HANGS.replace("{marker!r}", repr(str(tmp_path / "pids"))), timeout_s=0.3) as made:
        counts = []
        for _ in range(20):
            assert scores(made.grade(samples("a", "HANG", "b"))) == [1.0, None, 1.0]
            assert scores(made.grade(samples("c"))) == [1.0]
            counts.append(sum(map(lives, made.pids)))
        # up to two spare ones are made ready while some hang, and are ended after the batch
        assert max(counts) <= 4 and not any(map(lives, map(int, (tmp_path / "pids").read_text().split())))
        deadline = time.monotonic() + 10
        while sum(map(lives, made.pids)) > 2 and time.monotonic() < deadline:
            assert scores(made.grade(samples("c"))) == [1.0]
            time.sleep(0.1)
        assert sum(map(lives, made.pids)) <= 2


@pytest.mark.case("R04")
def test_a_hang_in_c_code_that_holds_the_interpreter_is_ended(tmp_path: Path) -> None:
    code = "import ctypes\ndef r(s):\n    if s.response == 'HANG': ctypes.PyDLL(None).pause()\n    return 1.0\n"
    with pool(tmp_path, code, timeout_s=1.0) as made:
        assert scores(made.grade(samples("a", "HANG", "b"))) == [1.0, None, 1.0]


@pytest.mark.case("R05")
def test_what_cannot_be_pickled_grades(tmp_path: Path) -> None:
    closure = (
        "k=2\ndef make():\n    def r(completions, **kw): return [k*1.0]*len(completions)\n    return r\nreward=make()"
    )
    with pool(tmp_path, closure, "reward") as made:
        assert scores(made.grade(samples("a", "b"))) == [2.0, 2.0]
    with pool(tmp_path, "reward = lambda s: float(s.response)", "reward") as made:
        assert scores(made.grade(samples("3"))) == [3.0]
    partial = "import functools\ndef f(s, k): return k\nreward = functools.partial(f, k=4)"
    with pool(tmp_path, partial, "reward") as made:
        assert scores(made.grade(samples("a"))) == [4.0]


@pytest.mark.case("R05")
def test_two_files_of_one_name_do_not_replace_each_other(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("two", 2.0)):
        (tmp_path / name).mkdir()
        with pool(tmp_path / name, f"def r(s): return {value}") as made:
            assert scores(made.grade(samples("a"))) == [value]


ENDS = {
    "abort": ("os.abort()", "SIGABRT"),
    "segfault": ("ctypes.string_at(0)", "SIGSEGV"),
    "exit": ("os._exit(3)", "exit code 3"),
    "kill": ("os.kill(os.getpid(), 9)", "SIGKILL"),
    "memory": ("bytearray(2 * 2**30)", "MemoryError"),
    "closed": ("os.closerange(3, 256); time.sleep(60)", "closed its connection"),
    "nonsense": ("[os.write(n, b'nonsense' * 99) for n in sockets()]; time.sleep(60)", "gave no result"),
    "unasked": ("[os.write(n, frame({'call': 10**9, 'graded': [[{'score': 1.0}, None]]})) for n in sockets()]", "gave"),
}
HEAD = """
import ctypes, os, stat, time
from moonshift.infra.rewards.wire import frame
def sockets():
    found = []
    for n in map(int, os.listdir('/proc/self/fd')):
        try:
            if stat.S_ISSOCK(os.fstat(n).st_mode): found.append(n)
        except OSError: pass
    return found
"""


@pytest.mark.parametrize("what", ENDS)
def test_a_process_that_ends_or_lies_costs_its_own_sample(tmp_path: Path, what: str) -> None:
    does, says = ENDS[what]
    code = f"{HEAD}\ndef r(s):\n    if s.response == 'bad':\n        {does}\n    return float(s.prompt.uid[1:])\n"
    with pool(tmp_path, code, memory_gib=0.25) as made:
        graded = made.grade(samples("a", "bad", "b", "c", "d", "e", "f", "g"))
        assert scores(graded) == [0.0, None, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        assert says in str(graded[1].error)
        assert scores(made.grade(samples("a", "a"))) == [0.0, 1.0]


def test_a_copy_that_the_function_makes_of_its_process_answers_for_nobody(tmp_path: Path) -> None:
    with pool(tmp_path, "import os\ndef r(s):\n    os.fork()\n    return float(s.prompt.uid[1:])\n") as made:
        assert scores(made.grade(samples(*"abcdefgh"))) == [float(n) for n in range(8)]


def test_each_of_many_samples_gets_its_own_result_though_some_crash(tmp_path: Path) -> None:
    code = (
        "import os\ndef r(s):\n    n = int(s.response)\n    if n % 97 == 5: os.abort()\n"
        "    if n % 101 == 7: raise ValueError(n)\n    return float(n)\n"
    )
    with pool(tmp_path, code) as made:
        graded = made.grade(samples(*map(str, range(1500))))
    assert scores(graded) == [None if n % 97 == 5 or n % 101 == 7 else float(n) for n in range(1500)]


def test_those_that_hang_wait_for_their_deadline_together(tmp_path: Path) -> None:
    code = "def r(s):\n    while s.response == 'HANG': pass\n    return 1.0\n"
    responses = ["HANG" if number % 50 == 20 else "a" for number in range(400)]
    with pool(tmp_path, code, timeout_s=3.0) as made:
        started = time.monotonic()
        graded = made.grade(samples(*responses))
        # one after the other on two processes: 4 times 3 s
        assert time.monotonic() - started < 2 * 3.0 + 2.0
    assert scores(graded) == [None if response == "HANG" else 1.0 for response in responses]


def test_a_slow_sample_is_set_aside_and_its_score_kept(tmp_path: Path) -> None:
    code = "import time\ndef r(s):\n    if s.response == 'slow': time.sleep(1.5)\n    return float(s.prompt.uid[1:])\n"
    responses = ["slow" if number % 40 == 10 else "a" for number in range(200)]
    with pool(tmp_path, code) as made:
        started = time.monotonic()
        assert scores(made.grade(samples(*responses))) == [float(number) for number in range(200)]
        assert time.monotonic() - started < 5  # one after the other on two processes: 3.75 s beside the rest


def test_the_process_that_loads_the_rewards_is_replaced_when_it_is_ended(tmp_path: Path) -> None:
    code = (
        f"import os, pathlib\nmarker = pathlib.Path({str(tmp_path / 'm')!r})\ndef r(s):\n"
        "    if s.response == 'kill' and not marker.exists():\n        marker.touch()\n"
        "        os.kill(os.getppid(), 9)\n"
        "    return float(s.prompt.uid[1:])\n"
    )
    with pool(tmp_path, code) as made:
        assert scores(made.grade(samples("a", "b", "kill", "c", "d"))) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_module_that_starts_threads_is_loaded_by_each_process(tmp_path: Path) -> None:
    code = (
        "import queue, threading\nasked, said = queue.Queue(), queue.Queue()\ndef work():\n"
        "    while True: said.put(asked.get() + 1.0)\nthreading.Thread(target=work, daemon=True).start()\n"
        "def r(s):\n    asked.put(float(s.prompt.uid[1:]))\n    return said.get()\n"
    )
    with pool(tmp_path, code) as made:
        assert scores(made.grade(samples(*"abcd"))) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        ("def q(s): return 1.0", RewardError, "has no 'r'"),
        ("import os; os._exit(7)", StageError, "exit code 7"),
        ("import time; time.sleep(60)", StageError, "not loaded within 1 s"),
        ("import os, time; os.fork() or time.sleep(0.1); os.abort()", StageError, "SIGABRT"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_refused(
    tmp_path: Path, code: str, error: type[Exception], says: str
) -> None:
    file = tmp_path / "reward.py"
    file.write_text(code)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(error, match=says):
        RewardPool(section(f"{file}:r"), start_timeout_s=1 if "within" in says else 30)
    assert until(lambda: set(psutil.Process().children(recursive=True)) <= before)


OWNER = """
import os, signal, sys
from moonshift.core.config.schema import RewardSection
from moonshift.core.types import Prompt, Sample
from moonshift.infra.rewards import RewardPool
made = RewardPool(RewardSection(function=sys.argv[1], timeout_s=60, processes_per_worker=2))
prompt = Prompt(uid="u", messages=(), text="", answer=None, source="t", extra={})
if sys.argv[2] == "exit":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
made.grade([Sample(prompt=prompt, response="x", finish_reason="stop", response_tokens=1)] * 2)
"""


@pytest.mark.parametrize(
    ("how", "number"), [("kill", signal.SIGKILL), ("exit", signal.SIGTERM), ("abort", signal.SIGABRT)]
)
def test_no_process_is_left_whatever_ends_their_owner(tmp_path: Path, how: str, number: int) -> None:
    marker = tmp_path / "pids"
    (tmp_path / "reward.py").write_text(
        "import os, subprocess, time\ndef r(s):\n"
        "    own = subprocess.Popen(['sleep', '600'])\n"
        "    away = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"    with open({str(marker)!r}, 'a') as f:\n"
        "        f.write(f'{os.getpid()} {os.getppid()} {own.pid} {away.pid}\\n')\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", OWNER, f"{tmp_path}/reward.py:r", how]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}) as owner:
        assert until(lambda: marker.exists() and marker.read_text().count("\n") == 2, 60)
        found = [int(word) for word in marker.read_text().split()]
        assert all(map(lives, found))
        owner.send_signal(number)
        owner.wait(30)
    assert until(lambda: not any(map(lives, found))), [pid for pid in found if lives(pid)]


def test_what_an_ended_sample_started_ends_with_it(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    code = (
        "import os, subprocess, time\ndef r(s):\n    if s.response == 'HANG':\n"
        "        away = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"        open({str(marker)!r}, 'w').write(str(away.pid))\n        time.sleep(600)\n    return 1.0\n"
    )
    with pool(tmp_path, code, timeout_s=0.5) as made:
        assert scores(made.grade(samples("a", "HANG"))) == [1.0, None]
        assert until(lambda: not lives(int(marker.read_text())))


def test_samples_cross_the_border_as_they_are() -> None:
    extra = {
        "n": 3,
        "big": 2**80,
        "x": 0.1,
        "none": None,
        "raw": b"\x00\xff",
        "when": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        "day": date(2026, 1, 2),
        "span": timedelta(days=1, microseconds=5),
        "money": Decimal("1.10"),
        "pair": (1, [2, {"~": "x", "y": (3,)}]),
        "keys": {1: "a", None: "b"},
        "text": "a\ud800\u2028é",
    }
    given = sample("r", 1, **extra)
    assert unpacked_sample(packed_sample(given)) == given
    array = unpacked_sample(packed_sample(sample("r", 1, a=np.array([[1, 2]], dtype=np.int8)))).prompt.extra["a"]
    assert array.dtype == np.int8 and array.tolist() == [[1, 2]]
    with pytest.raises(RewardError, match=r"u1: extra odd holds a object"):
        packed_sample(sample("r", 1, odd=object()))


@pytest.mark.parametrize(
    "packed",
    [
        None,
        [],
        [[{"score": 1.0}, None]] * 2,
        [[{"score": float("nan")}, None]],
        [[{"score": "1"}, None]],
        [[{"score": True}, None]],
        [[{"other": 1.0}, None]],
        [[None, None]],
        [[{"score": 1.0}, "both"]],
    ],
)
def test_a_result_that_is_none_is_not_believed(packed: Any) -> None:
    with pytest.raises(Distrust):
        unpacked_graded(packed, 1)
