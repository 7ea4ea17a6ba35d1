"""A real HTTP server before another one, that can refuse connections, answer 500, hang, and heal, all at one port.

In a process of its own: `python -m tests.infra.faulty_http HOST:PORT`. It prints its address, then takes the words
refuse, error, hang and heal from its standard input, one a line, and says each back once it is so.
"""

import http.client
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moonshift.infra.server_process import free_port

HANG_S = 30.0


class FaultyServer:
    """Forwards to `upstream` (host:port) unless it is told to fail: `fault` is refuse, error, hang or None."""

    def __init__(self, upstream: str) -> None:
        self.upstream, self.port = upstream, free_port()
        self.fault: str | None = None
        self.asked = 0
        self._server: ThreadingHTTPServer | None = None
        self.heal()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fail(self, fault: str) -> None:
        self.fault = fault
        if fault == "refuse":
            self.close()

    def heal(self) -> None:
        self.fault = None
        if self._server is None:
            self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
            self._server.daemon_threads = True
            threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def _handler(faulty: FaultyServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def forward(self) -> None:
            faulty.asked += 1
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if faulty.fault == "hang":
                time.sleep(HANG_S)
                return
            if faulty.fault == "error":
                self.answer(500, b"the database is gone", {})
                return
            connection = http.client.HTTPConnection(faulty.upstream, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            content = response.read()
            self.answer(response.status, content, {"Content-Type": response.getheader("Content-Type", "text/plain")})
            connection.close()

        def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = forward

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the tests look at what arrived."""

    return Handler


@contextmanager
def faulty_server(upstream: str) -> Iterator[FaultyServer]:
    server = FaultyServer(upstream)
    try:
        yield server
    finally:
        server.close()


def main() -> None:
    with faulty_server(sys.argv[1]) as server:
        print(server.uri, flush=True)
        for line in sys.stdin:
            word = line.strip()
            server.heal()
            if word != "heal":
                server.fail(word)
            print(word, flush=True)


if __name__ == "__main__":
    main()
