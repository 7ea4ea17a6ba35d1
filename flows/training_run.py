"""A training run started by hand: checks first, then the local Prefect server, then the flow, then what came of it."""

import os
import time
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.table import Table

from moonshift.core.config import config_from_json, to_yaml, without_secrets
from moonshift.core.config.schema import RecoverySection
from moonshift.core.errors import LeaseHeldError, LedgerError, ServiceError
from moonshift.infra.files import write_text
from moonshift.infra.fork import make_fork
from moonshift.infra.home import home, ledger_url, run_folder
from moonshift.infra.ledger import Ledger, RunState
from moonshift.infra.preemption import received
from moonshift.infra.preflight import prepare
from moonshift.infra.report import ACCURACY, REWARD, summarize
from moonshift.infra.run_config import latest_config
from moonshift.infra.services import StandingServer

from .config_view import show_translations
from .data_view import progress_bar, show_losses


def train_run(config: str, overrides: tuple[str, ...], *, resume: bool, display: str, debug: bool) -> dict[str, Any]:
    """Run the flow in this process against a standing local server, or the one at PREFECT_API_URL; returns the summary.

    A server that goes away in the meantime changes nothing; one that does not come at all, what
    `recovery.without_prefect` says.

    Raises:
        MoonshiftError: whatever the preflight, the services or the run raised.
    """
    # the message of an error is printed once, by the command line; Prefect would print its traceback too
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO" if debug else "CRITICAL")
    # by default the client tries for a minute, or six where the server hangs; here the ledger has the facts
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "1")
    os.environ.setdefault("PREFECT_API_REQUEST_TIMEOUT", "20")
    overrides = without_secrets(overrides, os.environ)  # the flow's parameters are shown on Prefect's pages
    with StandingServer(home()) as server:  # comes up while the preflight runs
        with progress_bar(Console(stderr=True)) as progress:
            prepared = prepare(config, overrides, progress)
        show_translations(prepared.loaded.translations, Console(stderr=True))
        show_losses(prepared, Console(stderr=True))
        for warning in prepared.warnings:
            Console(stderr=True).print(f"warning: {warning}", soft_wrap=True, markup=False)
        parameters = {"config": config, "overrides": list(overrides), "resume": resume, "display": display}
        summary = _run_flow(server, prepared.config.recovery, parameters)
    ledger = Ledger.open(ledger_url())
    try:
        summary = summarize(ledger, summary["run_id"])
        _show(summary, ledger)
    finally:
        ledger.close()
    return summary


def _run_flow(server: StandingServer, recovery: RecoverySection, parameters: dict[str, Any]) -> dict[str, Any]:
    """Call the flow once the server answers; again if it went away before the flow's body began."""
    end = time.monotonic() + recovery.prefect_wait_s
    while True:
        try:
            url = server.wait_ready(max(0.0, end - time.monotonic()))
        except ServiceError as error:
            if not recovery.without_prefect:
                raise ServiceError(f"{error}\nOr set recovery.without_prefect=true to run without it.") from error
            return _run_without_server(parameters)
        os.environ["PREFECT_API_URL"] = url
        from prefect.exceptions import CancelledRun

        from .flow_states import UNANSWERED, patient_client, settle_ledger
        from .post_train import post_train

        settle_ledger(url)  # what earlier runs could not tell it
        client = None
        try:
            with patient_client() as client:
                summary: Any = post_train(**parameters)
                return summary
        except CancelledRun as skipped:  # another process owns the run, see `skipped_if_owned`
            raise LeaseHeldError(str(skipped)) from skipped
        except UNANSWERED:
            if client is not None and client.began:
                raise
            time.sleep(1)  # the next round says so where it stays away
        finally:
            if client is not None and client.began:
                _tell(server, url, recovery.prefect_flush_timeout_s)


def _run_without_server(parameters: dict[str, Any]) -> dict[str, Any]:
    """The flow's plain function; no flow run shows it."""
    from .post_train import post_train

    Console(stderr=True).print("note: the Prefect server does not answer, the run goes on without it.", soft_wrap=True)
    return post_train.fn(**parameters)


def _tell(server: StandingServer, url: str, timeout_s: float) -> None:
    """See to it that the server shows how the flow ended; a local one that died is started again for it."""
    from .flow_states import hand_over, settle_ledger

    if received() is None:
        with suppress(ServiceError):
            url = server.revived(timeout_s) or url
    else:
        timeout_s = 0.0  # whoever sent the signal does not wait
    answers = settle_ledger(url, timeout_s)
    hand_over(answers)
    if not answers:
        Console(stderr=True).print(
            "note: the Prefect server does not answer; it will show how this run ended after the next "
            "`moonshift train` or `moonshift server start`.",
            soft_wrap=True,
        )


def resume_run(run_id: str, overrides: tuple[str, ...], *, display: str, debug: bool) -> dict[str, Any]:
    """Go on with a run by the config that the ledger keeps; secrets in it have to be given again.

    Raises:
        LedgerError: for a run that is unknown or complete.
    """
    ledger = Ledger.open(ledger_url())
    try:
        record = ledger.run(run_id)
        if record.state is RunState.COMPLETED:
            raise LedgerError(
                f"Run {run_id} is COMPLETED; there is nothing to go on with. Start a new run to train on."
            )
        file = run_folder(run_id) / "config.yaml"
        write_text(file, to_yaml(config_from_json(latest_config(ledger, record))))
    finally:
        ledger.close()
    given = (*overrides, f"run.id={run_id}")
    return train_run(str(file), given, resume=True, display=display, debug=debug)


def fork_run(run_id: str, step: int, overrides: tuple[str, ...]) -> str:
    """Make a run that goes on after `step` of another one, and return its id; `resume_run` starts it.

    Raises:
        MoonshiftError: see `make_fork`; nothing is left behind.
    """
    with Ledger.open(ledger_url()) as ledger:
        return make_fork(ledger, run_id, step, overrides).run_id


def _show(summary: dict[str, Any], ledger: Ledger) -> None:
    """The table, the curve in the terminal, and where everything is."""
    console = Console()
    table = Table(title=f"{summary['run_id']}: {summary['state']}")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    table.add_row("training reward", _number(summary["reward_first"]), _number(summary["reward_last"]))
    table.add_row("held-out score", _number(summary["eval_before"]), _number(summary["eval_after"]))
    table.add_row("steps / optimizer steps", "", f"{summary['steps']} / {summary['optimizer_steps']}")
    table.add_row("seconds (first reward / all)", _number(summary["first_reward_s"]), _number(summary["wall_s"]))
    console.print(table)
    print(_curve(ledger, summary["run_id"]))
    console.print(f"curve       {run_folder(summary['run_id']) / 'reward.png'}", soft_wrap=True)
    console.print(f"checkpoint  {summary['checkpoint']}", soft_wrap=True)
    console.print(f"weights     sha256 {summary['weights_sha256']}", soft_wrap=True)
    console.print("pages       moonshift ui prefect    moonshift ui mlflow", soft_wrap=True)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _curve(ledger: Ledger, run_id: str) -> str:
    """The reward curve in characters."""
    import plotext

    plotext.clear_figure()
    plotext.plot_size(72, 16)
    plotext.theme("clear")
    for key, label in ((REWARD, "training reward"), (ACCURACY, "held-out score")):
        series = ledger.metric_series(run_id, key)
        if series:
            steps, values = zip(*series, strict=True)
            plotext.plot(list(steps), list(values), label=label)
    plotext.xlabel("step")
    return plotext.build()
