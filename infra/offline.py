"""The environment in which Prefect, Ray, MLflow, Hugging Face and vLLM keep to this machine and to our home folder.

Invariant: what the user has set himself is never changed. These libraries read their environment at their import,
so this runs before them and imports nothing but the standard library.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

_NO_TELEMETRY = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}

_NO_LOOK_UPS = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

_PREFECT = {
    "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "2",
    # 30 s is the smallest allowed; the default of 180 s leaves a dead run "Running" for minutes
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # an ephemeral server is never wanted; where one is started all the same, its default of 20 s is too short when cold
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # one row a transaction costs the server 62 CPU-ms a task, these batches 27
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TRIGGERS_READ_BATCH_SIZE": "50",
}

_MLFLOW = {
    # with the defaults (7 tries, 120 s) a server that is away holds up training for minutes at each call
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}

_HOME_VARIABLE = "MOONSHIFT_QUIET_HOME"
_RAY_CHOICES = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def quiet_environment(home: Path) -> dict[str, str]:
    """The variables that turn off telemetry and outside look-ups and keep state below `home`.

    Ray gets a token of ours: a local cluster without one lets every account of this machine run code as this user, and
    by itself Ray would write the token to the user's home.
    """
    home = home.absolute()
    prefect_home = home / "prefect"
    return {
        **_NO_TELEMETRY,
        **_NO_LOOK_UPS,
        **_PREFECT,
        **_MLFLOW,
        "PREFECT_HOME": str(prefect_home),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(prefect_home / "results"),
        # by default the server copies its pages into the installed package, which may be read-only
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(prefect_home / "ui"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(home / "ray_token"),
        # whatever its name says: Ray finds its own address without connecting outside, and it is the loopback one
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # the tokenizers' threads and a later fork make a warning at best and a deadlock at worst
        "TOKENIZERS_PARALLELISM": "false",
    }


def completed_environment(home: Path, given: Mapping[str, str]) -> dict[str, str]:
    """`given` with every variable of `quiet_environment` that the user has not set, without an empty `PREFECT_API_URL`.

    Ray's authentication is left alone where the user has named a cluster or anything of its authentication. What an
    earlier call set for another home is no wish of the user's: the home it was for is kept in a variable, so that a
    child process that is given another home does not share the first one's database.
    """
    result = {name: value for name, value in given.items() if name != "PREFECT_API_URL" or value}
    before = result.get(_HOME_VARIABLE)
    for name, value in (quiet_environment(Path(before)) if before else {}).items():
        if result.get(name) == value:
            del result[name]
    quiet = quiet_environment(home)
    if result.get("RAY_ADDRESS"):
        del quiet["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]
    if any(result.get(name) for name in _RAY_CHOICES):
        del quiet["RAY_AUTH_MODE"], quiet["RAY_AUTH_TOKEN_PATH"]
    return {**quiet, **result, _HOME_VARIABLE: str(home.absolute())}


def apply_quiet_environment(home: Path) -> None:
    """Give this process the `completed_environment`; to be called before the libraries are imported.

    Raises:
        OSError: when `home` or Ray's token file in it cannot be written.
    """
    home.mkdir(parents=True, exist_ok=True)
    complete = completed_environment(home, os.environ)
    token = quiet_environment(home)["RAY_AUTH_TOKEN_PATH"]
    if complete.get("RAY_AUTH_TOKEN_PATH") == token:
        _ensure_token(Path(token))
    for name in os.environ.keys() - complete.keys():  # empty is not unset for Prefect: its event client dies
        del os.environ[name]
    os.environ.update(complete)


def _ensure_token(path: Path) -> None:
    """Make the token file once; of two that start together both use the first one's."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.touch(mode=0o600)
    try:
        temporary.write_text(secrets.token_hex(32), encoding="ascii")
        # a link, unlike a rename, refuses to replace what is there
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink(missing_ok=True)
