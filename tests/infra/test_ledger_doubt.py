"""A connection lost over a COMMIT: whether or not the server kept it, it is there once in the end."""

import socket
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import make_url

from moonshift.core.errors import CommitUnknownError
from moonshift.infra.ledger import Ledger, RunState

from ..postgres import PostgresServer
from .ledger_rows import new_run, sample, stage


class Cut:
    """Stands between ledger and server; when `armed`, cuts the next COMMIT `before` or `after` the server gets it."""

    def __init__(self, port: int) -> None:
        self._port, self.armed = port, ""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, asks: bool) -> None:
        try:
            while data := source.recv(65536):
                if asks and self.armed and b"COMMIT" in data:
                    how, self.armed = self.armed, ""
                    source.shutdown(socket.SHUT_RDWR)  # the client hears nothing of it
                    if how == "after":
                        target.sendall(data)
                    break
                target.sendall(data)
        except OSError:
            pass  # the other direction has ended it
        finally:
            if asks:
                target.shutdown(socket.SHUT_WR)


@pytest.fixture
def cut(postgres_server: PostgresServer) -> Iterator[Cut]:
    proxy = Cut(postgres_server.port)
    yield proxy
    proxy.close()


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_commit_in_doubt_is_there_once(postgres_server: PostgresServer, cut: Cut, how: str) -> None:
    url = make_url(postgres_server.url()).set(port=cut.port).render_as_string(hide_password=False)
    with Ledger.open(url, retry_s=20) as ledger:
        run_id = ledger.create_run(new_run(steps=1)).run_id
        lease = ledger.acquire(run_id, lease_s=60)
        for write in (
            lambda: ledger.commit_stage(lease, stage(metrics={"a": 1.0}, samples=(sample(),))),
            lambda: ledger.commit_step(lease, 1, 1),
            lambda: ledger.event(run_id, "note", {"n": 1}),
            lambda: ledger.release(lease, RunState.COMPLETED),
        ):
            cut.armed = how
            write()
            assert cut.armed == ""
        assert len(ledger.stages(run_id)) == len(ledger.samples(run_id, 1)) == len(ledger.events(run_id)) == 1
        assert ledger.count_pending(run_id) == ledger.last_step(run_id) == 1
        assert ledger.run(run_id).state is RunState.COMPLETED
        cut.armed = how
        with pytest.raises(CommitUnknownError, match="not known"):
            ledger.create_run(new_run())
