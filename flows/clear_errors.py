"""What the command line shows of an error: one message and an exit code, no traceback that nobody asked for."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from moonshift.core.errors import ConfigError, DataError, ModelError, MoonshiftError, PlanError, RewardError
from moonshift.infra.preemption import Preempted

USERS_FAULT = (ConfigError, DataError, ModelError, PlanError, RewardError)


@contextmanager
def clear_errors(debug: bool) -> Iterator[None]:
    """Print one message and exit: 2 for what the user wrote, 1 for what went wrong, 130 or 143 after a signal."""
    try:
        yield
    except MoonshiftError as error:
        if debug:
            raise
        from moonshift.core.config.masking import mask_text

        typer.echo(f"error: {_without_traceback(mask_text(str(error)))}", err=True)
        raise typer.Exit(2 if isinstance(error, USERS_FAULT) else 1) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from error
    except Preempted as error:
        typer.echo(f"stopped by {error}. {_GO_ON}", err=True)
        raise typer.Exit(128 + error.number) from error


_GO_ON = "What was committed is kept; a run that had begun goes on with --resume."


def _without_traceback(message: str) -> str:
    """A user's own traceback in a message becomes its last frame and its error; --debug shows it whole."""
    head, mark, rest = message.partition("Traceback (most recent call last):")
    lines = [line.strip() for line in rest.splitlines() if line.strip()]
    if not mark or not lines:
        return message
    frames = [line for line in lines if line.startswith("File ")]
    return "\n  ".join([head.rstrip(), *frames[-1:], lines[-1], "(--debug shows the whole traceback)"])
