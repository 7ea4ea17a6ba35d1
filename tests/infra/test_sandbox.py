"""What untrusted code cannot do from its box, in both modes; and the reward that grades with it."""

import json
import os
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest

from moonshift.core.errors import RewardError
from moonshift.core.types import Prompt, Sample
from moonshift.infra.sandbox import Box, Outcome, Protection, box, run
from moonshift.infra.sandbox.reward import code_tests

BOX = Box(timeout_s=3.0, memory_mib=256, processes=8, files_mib=4, output_kib=64)
BOTH = pytest.mark.parametrize("mode", list(Protection))


def boxed(mode: Protection, program: str, text: str = "", limits: Box = BOX) -> Outcome:
    outcome, refused = box._run(program, text, limits, mode)
    if outcome is None and "Operation not permitted" in refused:
        pytest.skip(f"this system permits no namespaces: {refused}")
    assert outcome is not None, refused
    assert outcome.protection == mode
    return outcome


def marked(word: str) -> list[int]:
    """Processes whose command line holds the word."""
    return [each.pid for each in psutil.process_iter(["cmdline"]) if word in " ".join(each.info["cmdline"] or ())]


@BOTH
def test_a_program_reads_writes_and_ends(mode: Protection) -> None:
    outcome = boxed(mode, "import sys\nprint(input()[::-1])\nprint('no', file=sys.stderr)\nsys.exit(3)", "abc\ndef")
    assert (outcome.code, outcome.output, outcome.errors, outcome.limit) == (3, "cba\n", "no\n", None)


@BOTH
def test_the_environment_and_the_descriptors_of_the_run_are_not_there(
    mode: Protection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "secret-of-the-run")
    with tempfile.TemporaryFile() as kept:
        os.set_inheritable(kept.fileno(), True)
        program = (
            "import os\nopen_ = []\nfor n in range(256):\n    try: os.fstat(n); open_.append(n)\n"
            "    except OSError: pass\nprint(sorted(set(os.environ) - {'LC_CTYPE'}), os.listdir('.'), open_)"
        )
        assert boxed(mode, program).output == "[] [] [0, 1, 2]\n"


def test_no_process_of_the_run_can_be_seen_or_its_environment_read() -> None:
    program = (
        "import os\nprint(os.getpid() < 5, os.path.exists('/proc/1'))\n"
        f"for pid in (1, {os.getpid()}, {os.getppid()}):\n"
        "    for attempt in (lambda: open(f'/proc/{pid}/environ').read(), lambda: os.kill(pid, 0)):\n"
        "        try: attempt(); print('reached', pid)\n"
        "        except OSError: pass\n"
    )
    assert boxed(Protection.NAMESPACES, program).output == "True False\n"


def test_the_environment_of_the_run_cannot_be_read_without_namespaces_either() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can let the program be another user than the run's")
    program = (
        f"try: print(len(open('/proc/{os.getpid()}/environ').read()))\nexcept OSError as error: print(error.errno)"
    )
    assert boxed(Protection.LIMITS, program).output == "13\n"


@BOTH
def test_os_system_runs_in_the_box(mode: Protection, tmp_path: Path) -> None:
    target = tmp_path / "written"
    tmp_path.chmod(0o755)
    program = f"import os\nos.system('echo hi; touch here; ls; touch {target}')\n"
    assert boxed(mode, program).output == "hi\nhere\n"
    assert not target.exists()


def test_nothing_outside_the_box_can_be_written_or_read(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    tmp_path.chmod(0o777)
    places = [str(tmp_path / "data"), "/tmp/moonshift-x", "/etc/passwd", "/usr/x", "/dev/shm/x", "/program.py", "/x"]
    program = (
        f"import os\nfor place in {places!r}:\n    try: open(place, 'a'); print('wrote', place)\n"
        "    except OSError: pass\n"
        f"for place in ({str(tmp_path)!r}, '/home', '/proc', '/sys', '/var', '/tmp'):\n"
        "    if os.path.exists(place): print('sees', place)\n"
    )
    assert boxed(Protection.NAMESPACES, program).output == ""
    assert (tmp_path / "data").read_text() == "x"


@BOTH
def test_a_fork_bomb_ends_with_its_program(mode: Protection) -> None:
    word = f"bomb{uuid.uuid4().hex}"
    program = (
        "import os, sys, time\n"
        f"word = {word!r}\n"
        "made = 0\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0:\n"
        "            os.setsid(); time.sleep(600)\n"
        "        made += 1\n"
        "except OSError:\n"
        "    print(made)\n"
    )
    before = len(psutil.pids())
    outcome = boxed(mode, program)
    assert 0 < int(outcome.output) <= BOX.processes
    assert len(psutil.pids()) < before + BOX.processes
    assert until_gone("program.py")


def until_gone(word: str) -> bool:
    end = time.monotonic() + 5
    while marked(word) and time.monotonic() < end:
        time.sleep(0.05)
    return not marked(word)


@BOTH
def test_a_bomb_that_goes_on_is_ended_with_all_of_its_processes(mode: Protection) -> None:
    program = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    outcome = boxed(mode, program, limits=Box(timeout_s=1.0, processes=8))
    assert outcome.limit == "more than 1 s" and outcome.code is None
    assert until_gone("program.py")


@BOTH
def test_background_processes_do_not_stay(mode: Protection) -> None:
    seconds = f"600.{uuid.uuid4().int % 10**9}"
    program = (
        "import os, subprocess\nfor _ in range(3):\n"
        f"    if os.fork() == 0:\n        os.setsid()\n        os.execv('/bin/sleep', ['sleep', '{seconds}'])\n"
        "print('done')\n"
    )
    outcome = boxed(mode, program)
    assert outcome.output == "done\n"
    assert until_gone(seconds)


@BOTH
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut_off(mode: Protection, stream: str) -> None:
    outcome = boxed(mode, f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    assert outcome.limit == "more than 64 KiB of output"
    assert len(outcome.output) + len(outcome.errors) == 64 * 1024


@BOTH
def test_time_memory_files_and_core_dumps_are_limited(mode: Protection) -> None:
    assert boxed(mode, "while True: pass", limits=Box(timeout_s=0.5)).limit == "more than 0.5 s"
    assert boxed(mode, "import time; time.sleep(60)", limits=Box(timeout_s=0.5)).limit == "more than 0.5 s"
    assert "MemoryError" in boxed(mode, "x = bytearray(2**30)").errors
    assert boxed(mode, "open('f', 'wb').write(b'x' * 2**25)").code == 1
    assert boxed(mode, "import os; os.abort()").code == -6


def test_many_small_files_are_limited_together() -> None:
    program = "for n in range(10**6):\n    open(str(n), 'wb').write(b'x' * 2**20)\n"
    assert "No space left" in boxed(Protection.NAMESPACES, program).errors


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = (
            f"import socket\nfor address in (('1.1.1.1', 53), ('127.0.0.1', {server.getsockname()[1]})):\n"
            "    try: socket.create_connection(address, 1); print('connected')\n"
            "    except OSError: print('refused')\n"
        )
        assert boxed(Protection.NAMESPACES, program).output == "refused\nrefused\n"


def test_the_weak_mode_has_a_network_and_is_never_taken_unasked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1); print('in')"
        assert boxed(Protection.LIMITS, program).output == "in\n"


def test_a_box_that_cannot_be_built_is_an_error_and_the_weak_one_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = Path(box._LAUNCHER).read_text(encoding="utf-8")
    # a system that permits no namespaces: this flag is refused by every kernel
    broken = tmp_path / "launch.py"
    broken.write_text(text.replace("flags = NEWNS |", "flags = 0x1 | NEWNS |"), encoding="utf-8")
    assert broken.read_text() != text
    monkeypatch.setattr(box, "_LAUNCHER", broken)
    with pytest.raises(RewardError, match=r"cannot be boxed in here: .*Invalid argument.*allow_weak"):
        run("print(1)")
    outcome = run("print(1)", box=Box(allow_weak=True))
    assert (outcome.output, outcome.protection) == ("1\n", Protection.LIMITS)


def test_a_user_without_rights_gets_the_same_box(tmp_path: Path) -> None:
    """The launcher as another user than root: a user namespace in place of root's rights."""
    if os.geteuid() != 0 or not Path("/usr/bin/python3").exists():
        pytest.skip("needs root, to become somebody else, and a Python that everybody may run")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        launcher = place / "launch.py"
        launcher.write_text(box._LAUNCHER.read_text(encoding="utf-8"), encoding="utf-8")
        (place / "box").mkdir()
        for path in (place, place / "box", launcher):
            os.chown(path, 12345, 12345)
        python = os.path.realpath("/usr/bin/python3")
        order = {
            "mode": "namespaces",
            "program": "import os, socket\nprint(os.getuid(), os.listdir('.'), os.path.exists('/proc/1'))\n"
            "try: socket.create_connection(('1.1.1.1', 53), 1)\nexcept OSError as error: print(error.strerror)\n",
            "python": python,
            "python_home": "/usr",
            "memory_mib": 512,
            "files_mib": 4,
            "processes": 8,
            "cpu_s": 3,
            "folder": str(place / "box"),
        }
        (read_order, write_order), (read_result, write_result) = os.pipe(), os.pipe()
        process = subprocess.Popen(
            [python, "-I", "-S", "-B", str(launcher), str(read_order), str(write_result)],
            env={},
            pass_fds=[read_order, write_result],
            user=12345,
            group=12345,
            extra_groups=[],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        os.close(read_order)
        os.close(write_result)
        with os.fdopen(write_order, "w") as file:
            json.dump(order, file)
        output = process.communicate(timeout=20)[0].decode()
        with os.fdopen(read_result) as file:
            said = json.load(file)
    if "refused" in said and "Operation not permitted" in said["refused"]:
        pytest.skip(f"this system gives users no namespaces: {said['refused']}")
    assert said == {"code": 0}
    assert output == "65534 [] False\nNetwork is unreachable\n"


def graded(response: str, answer: object, **kwargs: bool) -> dict[str, float]:
    prompt = Prompt(uid="u", messages=(), text="", answer=answer, source="t", extra={})
    return code_tests(Sample(prompt=prompt, response=response, finish_reason="stop", response_tokens=1), **kwargs)


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\n"


DOUBLE = [{"input": "2", "output": "4"}, {"input": "5\n", "output": "10 \n"}]


def test_code_is_graded_by_what_it_writes() -> None:
    assert graded(fenced("print(2 * int(input()))"), DOUBLE) == {"score": 1.0, "passed": 1.0, "has_code": 1.0}
    assert graded(fenced("print(4)"), json.dumps({"inputs": ["2", "5"], "outputs": ["4", "10"]}))["passed"] == 0.5
    assert graded(fenced("print(4)"), DOUBLE, partial=True)["score"] == 0.5
    assert graded("print(4)", DOUBLE) == {"score": 0.0, "passed": 0.0, "has_code": 0.0}
    assert graded(fenced("import os; os.kill(os.getpid(), 9)"), DOUBLE)["score"] == 0.0


def test_code_is_graded_by_assertions_and_not_by_an_early_exit() -> None:
    tests = "assert double(2) == 4\nassert double(5) == 10\n"
    assert graded(fenced("def double(x): return 2 * x"), tests)["score"] == 1.0
    assert graded(fenced("def double(x): return 4"), tests)["score"] == 0.0
    assert graded(fenced("import os\nos._exit(0)"), tests)["score"] == 0.0


def test_a_prompt_without_tests_is_an_error_and_no_zero() -> None:
    with pytest.raises(RewardError, match="u: its answer holds no tests; write a list"):
        graded(fenced("print(1)"), "42")
