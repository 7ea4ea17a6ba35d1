"""Standing servers: started once, found again, and gone without a trace; and the quiet environment they run in."""

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from moonshift.core.errors import ServiceError
from moonshift.infra.offline import apply_quiet_environment, completed_environment, quiet_environment
from moonshift.infra.server_process import log_tail
from moonshift.infra.server_programs import PREFECT, ServerProgram, mlflow_program
from moonshift.infra.services import StandingServer, acquire, start_standing, status, stop

# a second real server, ready in a fraction of a second
PAGES = ServerProgram(
    name="pages",
    title="page server",
    arguments=lambda port: ["-m", "http.server", str(port), "--bind", "127.0.0.1"],
    health_path="/",
)

CLIENT = """
import sys
from pathlib import Path
from moonshift.infra.services import acquire, status
server = acquire(Path(sys.argv[1]))
print(status(Path(sys.argv[1])).pid, server.wait_ready(), flush=True)
sys.stdin.read()
server.release()
"""


def code(name: str, text: str) -> ServerProgram:
    """A program given as text; its port is sys.argv[1]."""
    return replace(PAGES, name=name, arguments=lambda port: ["-c", text, str(port)])


def processes_of(home: Path) -> list[psutil.Process]:
    """Every process that was started as a server of the home."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get("MOONSHIFT_SERVER", "")
        except psutil.Error:
            continue
        if mark.startswith(str(home.resolve())):
            found.append(process)
    return found


def leftovers(home: Path) -> list[str]:
    """State and client files, and whatever is half-written."""
    services = home / "services"
    files = [*services.glob("*.json"), *(services / "clients").iterdir(), *services.glob(".*")]
    return [path.name for path in files]


def page(url: str) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        return answer.status


def write_record(home: Path, **changes: object) -> None:
    record = {"pid": 1, "create_time": 1.0, "port": 1, "url": "http://127.0.0.1:1", "standing": False, **changes}
    (home / "services").mkdir(parents=True)
    (home / "services" / "pages.json").write_text(json.dumps(record), encoding="utf-8")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    yield tmp_path
    for process in processes_of(tmp_path):
        process.kill()


def test_two_starters_share_one_prefect_server_that_goes_with_the_last_living_one(home: Path) -> None:
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        answers = {starter.stdout.readline() for starter in starters if starter.stdout}
        assert len(answers) == 1
        pid, url = answers.pop().split()
        found = status(home)
        assert (found.state, found.pid, found.url, found.clients) == ("ready", int(pid), url, 2)
        assert [process.pid for process in processes_of(home)] == [int(pid)]
        assert url.endswith("/api")
        assert page(f"{url}/health") == 200
        assert page(found.page or "") == 200
        assert (home / "prefect" / "prefect.db").exists()
        starters[0].kill()
        starters[0].wait(timeout=10)
        assert status(home).clients == 1
        starters[1].communicate(timeout=30)
        assert starters[1].returncode == 0
    finally:
        for starter in starters:
            starter.kill()
            starter.communicate()
    assert processes_of(home) == []
    assert leftovers(home) == []
    assert "Traceback" not in log_tail(home / "services" / "prefect.log", 1000)


@pytest.mark.slow
def test_the_mlflow_server_and_its_workers_end_together(home: Path) -> None:
    with acquire(home, program=mlflow_program(f"sqlite:///{home}/mlflow.db")) as server:
        assert page(server.wait_ready()) == 200
        assert len(processes_of(home)) > 1
    assert processes_of(home) == []
    assert leftovers(home) == []


def test_an_occupied_port_is_named_and_nothing_is_left(home: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServiceError, match=rf"Port {port} for the page server .* in use.* choose another port"):
            start_standing(home, port=port, program=PAGES)
        with pytest.raises(ServiceError, match=f"Port {port}"):
            StandingServer(home, port=port, program=PAGES).begin()
    assert processes_of(home) == []
    assert leftovers(home) == []


def test_a_port_that_is_no_port_is_refused(home: Path) -> None:
    with pytest.raises(ServiceError, match="a number from 1 to 65535"):
        StandingServer(home, port=70000, program=PAGES).begin()


def test_the_state_of_a_dead_server_is_replaced(home: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=10)
    write_record(home, pid=dead.pid)
    assert status(home, program=PAGES).state == "stopped"
    with acquire(home, program=PAGES) as server:
        assert page(server.wait_ready()) == 200
    assert leftovers(home) == []


@pytest.mark.parametrize("shift_s", [0.0, -100.0])
def test_a_stranger_with_the_servers_number_is_never_touched(home: Path, shift_s: float) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        born = psutil.Process(stranger.pid).create_time()
        write_record(home, pid=stranger.pid, create_time=born + shift_s, standing=True)
        assert status(home, program=PAGES).state == "stopped"
        with acquire(home, program=PAGES):
            assert status(home, program=PAGES).pid != stranger.pid
        assert not stop(home, program=PAGES)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(timeout=10)


def test_an_unreadable_state_file_is_replaced(home: Path) -> None:
    write_record(home)
    (home / "services" / "pages.json").write_text('{"pid": 1', encoding="utf-8")
    with acquire(home, program=PAGES) as server:
        assert page(server.wait_ready()) == 200
    assert leftovers(home) == []


def test_a_server_that_dies_at_its_start_shows_the_end_of_its_log(home: Path) -> None:
    program = code("frail", "print('the database is from the future'); raise SystemExit(3)")
    with pytest.raises(ServiceError) as raised:
        acquire(home, program=program)
    assert "the database is from the future" in str(raised.value)
    assert str(home / "services" / "frail.log") in str(raised.value)
    assert processes_of(home) == []
    assert leftovers(home) == []


@pytest.mark.parametrize("start", [acquire, start_standing])
def test_a_server_that_never_answers_is_ended_at_the_deadline(home: Path, start: object) -> None:
    program = code("mute", "import time; print('waiting', flush=True); time.sleep(60)")
    with pytest.raises(ServiceError, match=r"did not answer at .* within 2 s(?s:.*)waiting"):
        (acquire if start is acquire else start_standing)(home, deadline_s=2, program=program)
    assert processes_of(home) == []
    assert leftovers(home) == []


def test_children_that_ignore_sigterm_in_a_session_of_their_own_end_too(home: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    text = f"""
import subprocess, sys, http.server
subprocess.Popen([sys.executable, "-c", {stubborn!r}], start_new_session=True)
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""
    with acquire(home, program=code("parent", text)):
        assert len(processes_of(home)) == 2
    assert processes_of(home) == []


def test_a_killed_server_is_started_anew_and_its_children_do_not_stay(home: Path) -> None:
    text = """
import subprocess, sys, http.server
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""
    program = code("parent", text)
    first = acquire(home, program=program)
    before = processes_of(home)
    os.kill(status(home, program=program).pid or 0, signal.SIGKILL)
    with acquire(home, program=program):
        assert not set(before) & set(processes_of(home))
    first.release()
    assert processes_of(home) == []


def test_a_standing_server_stays_until_it_is_stopped(home: Path) -> None:
    found = start_standing(home, program=PAGES)
    assert (found.state, found.standing, found.clients) == ("ready", True, 0)
    assert f"ready at {found.url}" in str(found)
    with acquire(home, program=PAGES):
        assert status(home, program=PAGES).pid == found.pid
    assert status(home, program=PAGES).state == "ready"
    with pytest.raises(ServiceError, match="runs already at port"):
        start_standing(home, port=1, program=PAGES)
    assert stop(home, program=PAGES)
    assert not stop(home, program=PAGES)
    assert status(home, program=PAGES).state == "stopped"
    assert processes_of(home) == []


def test_a_servers_own_process_can_share_it_twice(home: Path) -> None:
    with acquire(home, program=PAGES):
        with acquire(home, program=PAGES):
            assert status(home, program=PAGES).clients == 2
        assert status(home, program=PAGES).state == "ready"
    assert processes_of(home) == []


def test_loopback_is_not_asked_through_a_proxy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with acquire(home, program=PAGES, deadline_s=20) as server:
        assert status(home, program=PAGES).url == server.wait_ready()


def test_the_users_own_prefect_server_is_used_and_none_is_started(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with acquire(home, program=PAGES) as pages:
        url = f"{pages.wait_ready()}/api"
        monkeypatch.setenv("PREFECT_API_URL", url)
        with StandingServer(home) as server:
            assert server.wait_ready(20) == url
        assert status(home).state == "external"
        assert not (home / "services" / "prefect.json").exists()
    with pytest.raises(ServiceError, match=f"PREFECT_API_URL={url} did not answer within 1 s.*unset"):
        acquire(home, deadline_s=1)


def test_what_the_user_set_is_not_changed(tmp_path: Path) -> None:
    given = {"PREFECT_HOME": "/mine", "HF_HUB_OFFLINE": "0", "RAY_ADDRESS": "head:6379"}
    complete = completed_environment(tmp_path, given)
    assert given.items() <= complete.items()
    assert complete["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"} & complete.keys()


def test_an_empty_prefect_url_is_as_good_as_none(tmp_path: Path) -> None:
    assert "PREFECT_API_URL" not in completed_environment(tmp_path, {"PREFECT_API_URL": ""})
    assert completed_environment(tmp_path, {"PREFECT_API_URL": "http://a"})["PREFECT_API_URL"] == "http://a"


def test_a_child_process_with_another_home_does_not_share_the_first_ones_database(tmp_path: Path) -> None:
    first = completed_environment(tmp_path / "one", {"MLFLOW_HTTP_REQUEST_TIMEOUT": "60"})
    second = completed_environment(tmp_path / "two", first)
    assert second["PREFECT_HOME"] == str(tmp_path / "two" / "prefect")
    assert second["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "60"


def test_the_quiet_environment_is_applied_with_a_private_ray_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in (*quiet_environment(tmp_path), "RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        os.environ.pop(name, None)
    apply_quiet_environment(tmp_path)
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert (token.stat().st_mode & 0o777, len(token.read_text())) == (0o600, 64)
    assert quiet_environment(tmp_path).items() <= os.environ.items()
    text = token.read_text()
    apply_quiet_environment(tmp_path)
    assert token.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["ray_token"]


def test_the_quiet_environment_comes_before_every_library() -> None:
    show = "import sys, moonshift.infra.offline; print(sorted(m for m in sys.modules if '.' not in m))"
    run = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(ast.literal_eval(run.stdout))
    assert not loaded & {"prefect", "ray", "mlflow", "torch", "transformers", "huggingface_hub", "vllm", "pydantic"}


def test_prefect_reads_the_quiet_environment(tmp_path: Path) -> None:
    show = (
        "from prefect.settings import get_current_settings as g; s = g().server; "
        "print(g().home, s.analytics_enabled, s.services.task_run_recorder.batch_size, s.ui.static_directory)"
    )
    environment = completed_environment(tmp_path, {"PATH": os.environ["PATH"]})
    run = subprocess.run(
        [sys.executable, "-c", show], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.split() == [f"{tmp_path}/prefect", "False", "50", f"{tmp_path}/prefect/ui"]


def test_the_program_of_prefect_listens_on_loopback_only() -> None:
    assert PREFECT.arguments(4200)[-4:] == ["--host", "127.0.0.1", "--port", "4200"]
