"""The judge against a real HTTP server on this machine."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from moonshift.core.rewards import Graded, RewardSet, WeightedReward, load_reward
from moonshift.core.types import Prompt, Sample

KEY = "sk-very-secret-0123"
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class Judge:
    """A server whose answers a test chooses; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], str]] = []
        self.answer: Answer = lambda body: (200, said("Score: 5"))
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.requests.append((self.path, body, self.headers.get("Authorization", "")))
                state, value = owner.answer(body)
                text = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(state)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:
                """Tests print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def judge() -> Iterator[Judge]:
    started = Judge()
    thread = threading.Thread(target=started.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield started
    started.server.shutdown()
    started.server.server_close()
    thread.join()


def said(text: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def samples(*responses: str) -> list[Sample]:
    prompt = Prompt(uid="a:0", messages=(), text="Say hello.", answer="hello", source="a", extra={})
    return [Sample(prompt=prompt, response=each, finish_reason="stop", response_tokens=1) for each in responses]


def grade(judge: Judge, *responses: str, **kwargs: Any) -> list[Graded]:
    settings = {"url": judge.url, "model": "m", "wait_s": 0.01, "retries": 2} | kwargs
    return RewardSet([WeightedReward(reward=load_reward("moonshift.core.rewards.judge:judge_reward", settings))]).grade(
        samples(*responses)
    )


def test_the_verdict_is_scaled_and_the_request_is_what_an_openai_server_expects(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge.answer = lambda body: (200, said("It greets.\n**Score: 8**\n"))
    (graded,) = grade(judge, "hello {answer}", key_env="JUDGE_KEY", parameters={"max_tokens": 50})
    assert graded.components == {"score": 0.8}
    ((path, body, key),) = judge.requests
    assert path == "/v1/chat/completions" and key == f"Bearer {KEY}"
    assert body["model"] == "m" and body["max_tokens"] == 50 and body["temperature"] == 0.0
    asked = body["messages"][0]["content"]
    assert "Say hello." in asked and "hello {answer}" in asked and "from 0 to 10" in asked


def test_many_samples_are_judged_at_once_each_with_its_own_verdict(judge: Judge) -> None:
    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.3)
        return 200, said(f"Score: {body['messages'][0]['content'][-1]}")

    judge.answer = slow
    started = time.perf_counter()
    graded = grade(judge, *"0123456789", template="{response}")
    assert [each.components for each in graded] == [{"score": pytest.approx(n / 10)} for n in range(10)]
    assert time.perf_counter() - started < 2.5


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (said("I like it."), "gave no line 'Score: <number>'"),
        (said("Score: 11"), "gave 11, not from 0 to 10"),
        (said("Score: -1"), "gave -1, not from 0 to 10"),
        (said(None), "answered with NoneType instead of text"),
        ({"error": "x"}, "answered without choices[0].message.content"),
        (b"<html>", "answered without choices[0].message.content"),
    ],
)
def test_an_answer_without_a_verdict_is_an_error_and_no_score(judge: Judge, answer: Any, reason: str) -> None:
    judge.answer = lambda body: (200, answer)
    (graded,) = grade(judge, "x")
    assert graded.components is None and reason in str(graded.error)


def test_a_busy_server_is_asked_again_and_a_refusal_is_not(judge: Judge) -> None:
    judge.answer = lambda body: (503, {}) if len(judge.requests) < 3 else (200, said("Score: 10"))
    assert grade(judge, "x")[0].components == {"score": 1.0}
    assert len(judge.requests) == 3
    judge.requests.clear()
    judge.answer = lambda body: (404, {"error": "no model m"})
    assert "state 404: " in str(grade(judge, "x")[0].error)
    assert len(judge.requests) == 1
    judge.answer = lambda body: (429, {})
    assert "state 429" in str(grade(judge, "x")[0].error)


def test_the_key_is_in_no_message_and_no_log(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge.answer = lambda body: (401, {"error": f"wrong key {KEY}"})
    with caplog.at_level(logging.DEBUG):
        (graded,) = grade(judge, "x", key_env="JUDGE_KEY")
    assert "state 401" in str(graded.error) and KEY not in str(graded.error)
    assert KEY not in caplog.text


def test_settings_that_cannot_work_are_named(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    assert "environment variable JUDGE_KEY" in str(grade(judge, "x", key_env="JUDGE_KEY")[0].error)
    assert "unexpected keyword argument 'modle'" in str(grade(judge, "x", modle="m")[0].error)
    assert "low is 3 and high is 1" in str(grade(judge, "x", low=3, high=1)[0].error)
    nowhere = grade(judge, "x", url="http://127.0.0.1:9/v1", retries=0)
    assert "did not answer (ConnectError" in str(nowhere[0].error)
    assert judge.requests == []
