"""Which servers can be kept, and what is said of one."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProgram:
    """A server that can be run: `arguments(port)` follow the interpreter's path; its pages lie at the root."""

    name: str
    """of its state, log and lock files"""
    title: str
    arguments: Callable[[int], list[str]]
    health_path: str
    """answers 200 once the server works"""
    api_path: str = ""
    """what a client's URL has after the port"""
    url_variable: str | None = None
    """the environment variable where the user names a server of his own, which then is used instead"""


PREFECT = ServerProgram(
    name="prefect",
    title="Prefect server",
    arguments=lambda port: ["-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
    health_path="/api/health",
    api_path="/api",
    url_variable="PREFECT_API_URL",
)


def mlflow_program(store_uri: str) -> ServerProgram:
    """MLflow's pages over a tracking store such as `sqlite:////path/mlflow.db`; one worker serves one reader."""
    options = ["-m", "mlflow", "server", "--backend-store-uri", store_uri, "--workers", "1", "--host", "127.0.0.1"]
    return ServerProgram(
        name="mlflow",
        title="MLflow server",
        arguments=lambda port: [*options, "--port", str(port)],
        health_path="/health",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """What is known of a home's server; `external` is one that the user named by `url_variable`."""

    title: str
    state: Literal["stopped", "starting", "ready", "external"]
    log: Path
    url: str | None = None
    """for clients"""
    page: str | None = None
    """for a browser"""
    pid: int | None = None
    standing: bool = False
    """stays when its last client goes"""
    clients: int = 0

    def __str__(self) -> str:
        if self.state == "stopped":
            return f"{self.title}: stopped"
        if self.state == "external":
            return f"{self.title}: yours, at {self.url}"
        stays = "until it is stopped" if self.standing else f"as long as one of its {self.clients} clients does"
        return f"{self.title}: {self.state} at {self.page} (process {self.pid}, stays {stays}; log {self.log})"
