"""The `hf-dist` command, one file per noun. A file imports torch or transformers only inside its functions.

To add a command: a file beside this one, and one line below.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hf_dist.errors import HfDistError
from hf_dist.tools.cli import (
    balance,
    bench,
    check,
    checkpoint,
    config,
    doctor,
    env,
    launch,
    mesh,
    plan,
    profile,
    schedule,
    tune,
    watch,
)
from hf_dist.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="hf-dist",
    context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit it
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hf-dist {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Shard Hugging Face models from a DeepSpeed-style JSON."""


app.command()(env.env)
app.command()(doctor.doctor)
app.command()(check.check)
app.command()(bench.bench)
app.command(context_settings=launch.SETTINGS)(launch.launch)
app.command()(checkpoint.export)
app.command()(checkpoint.inspect)
app.command()(schedule.schedule)
app.command()(mesh.mesh)
app.command()(plan.plan)
app.command()(profile.profile)
app.command()(balance.balance)
app.command()(tune.tune)
app.command()(watch.watch)
app.add_typer(config.app, name="config")
app.add_typer(checkpoint.app, name="checkpoint")


def main() -> None:
    """Entry point of the console script. Errors of hf_dist and of files are printed without a traceback; exit code 1."""
    try:
        app()
    except HfDistError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except OSError as error:  # a file or folder that cannot be read or written
        print(f"{error.filename}: {error.strerror}" if error.filename else error, file=sys.stderr)
        sys.exit(1)
