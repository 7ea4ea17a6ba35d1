"""A PostgreSQL server of the tests' own, from the programs that the machine has; it is stopped with the session."""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL, create_engine, text

USER = "moonshift"
_START_S = 60
_DEBIAN = Path("/usr/lib/postgresql")  # which keeps the server's programs out of PATH


def programs() -> Path | None:
    """Folder of initdb and pg_ctl: that of PATH, or Debian's newest; None when there is none."""
    found = shutil.which("pg_ctl")
    folders = [Path(found).resolve().parent] if found else []
    versions = [path for path in _DEBIAN.glob("*") if path.name.isdecimal()]
    folders += [path / "bin" for path in sorted(versions, key=lambda path: int(path.name), reverse=True)]
    return next((path for path in folders if (path / "initdb").exists() and (path / "pg_ctl").exists()), None)


def account() -> str | None:
    """The user that the server runs as: PostgreSQL refuses to run as root. None: this process's own."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


class PostgresServer:
    """One server on a free port of the loopback; every database on it is empty and asks for a password.

    It sorts texts as English does, not by code point: whoever relies on the order of a database shows.
    """

    def __init__(self, folder: Path, binaries: Path) -> None:
        self._folder, self._binaries, self._account = folder, binaries, account()
        self.password = secrets.token_hex(8)
        self.port = _free_port()
        self._made = 0
        if self._account is not None:
            shutil.chown(folder, self._account)
        secret = folder / "password"
        secret.write_text(self.password)
        secret.chmod(0o644)  # inside a folder that only its owner enters
        self._run(
            "initdb", "-U", USER, "--pwfile", str(secret), "--auth=scram-sha-256", "--encoding=UTF8", "--no-sync",
            "--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en-US",
        )  # fmt: skip

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",  # no test takes the power away
            "max_connections": 60,
        }
        options = " ".join(f"-c {key}='{value}'" for key, value in settings.items())
        self._run("pg_ctl", "start", "-w", "-t", str(_START_S), "-l", str(self._folder / "log"), "-o", options)

    def stop(self, how: str = "fast") -> None:
        """Stop it: `fast` ends every connection in order, `immediate` is a crash."""
        self._run("pg_ctl", "stop", "-w", "-m", how)

    def url(self, database: str = "", *, user: str = USER, password: str = "", port: int = 0) -> str:
        """URL of a database; of a new and empty one where none is named."""
        address = URL.create(
            "postgresql+psycopg",
            user,
            password or self.password,
            "127.0.0.1",
            port or self.port,
            database or "postgres",
        )
        if database:
            return address.render_as_string(hide_password=False)
        self._made += 1
        name = f"test_{self._made}"
        engine = create_engine(address, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return address.set(database=name).render_as_string(hide_password=False)

    def _run(self, program: str, *arguments: str) -> None:
        log = self._folder / "commands"
        with log.open("ab") as output:  # a server would hold a pipe open for as long as it runs
            done = subprocess.run(
                [self._binaries / program, "-D", str(self._folder / "data"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                user=self._account,
                group=None if self._account is None else pwd.getpwnam(self._account).pw_gid,
                extra_groups=None if self._account is None else [],
                timeout=2 * _START_S,
            )
        if done.returncode:
            words = [path.read_text(errors="replace") for path in (log, self._folder / "log") if path.exists()]
            raise RuntimeError(f"{program} ended with {done.returncode}:\n" + "\n".join(words))


@contextmanager
def running_server(binaries: Path) -> Iterator[PostgresServer]:
    """A started server in a folder of its own; both are gone afterwards."""
    # not below pytest's folder, which another user cannot enter
    with tempfile.TemporaryDirectory(prefix="moonshift-postgres-") as folder:
        server = PostgresServer(Path(folder), binaries)
        server.start()
        try:
            yield server
        finally:
            server.stop("immediate")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
