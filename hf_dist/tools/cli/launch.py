"""`hf-dist launch`: accelerate's launcher for a YAML that says DEEPSPEED, without the deepspeed package.

`accelerate launch` imports deepspeed only for a file name that its multi-machine launcher needs. On one machine it starts
the processes with torchrun. Source: accelerate 1.15 commands/launch.py `deepspeed_launcher`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_dist.config.load import check_script
from hf_dist.errors import ConfigError, Problem

if TYPE_CHECKING:
    from argparse import Namespace

__all__ = ["SETTINGS", "distributed_type", "launch"]

SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Settings of the command: every word belongs to accelerate or the script."""
_RUNNER = "hf_dist.run"


def launch(
    words: Annotated[list[str], typer.Argument(metavar="[OPTIONS OF ACCELERATE LAUNCH] (SCRIPT | -m MODULE) ...")],
) -> None:
    """Run an unmodified script sharded, with the options and the YAML of `accelerate launch`. Needs no deepspeed.

    hf-dist launch --config_file zero3.yaml train.py --output_dir out
    """
    from accelerate.commands import launch as stock

    arguments = stock.launch_command_parser().parse_args(words)
    _refuse(arguments)
    if not arguments.module:
        check_script(arguments.training_script)
    if not arguments.module or arguments.training_script != _RUNNER:
        named = ["-m", arguments.training_script] if arguments.module else [arguments.training_script]
        arguments.training_script_args = [*named, *arguments.training_script_args]
        arguments.training_script, arguments.module = _RUNNER, True
    theirs, stock.deepspeed_launcher = stock.deepspeed_launcher, _launch_with_torchrun
    try:
        with _last_words_of_the_script():
            stock.launch_command(arguments)
    finally:
        stock.deepspeed_launcher = theirs


@contextlib.contextmanager
def _last_words_of_the_script() -> Iterator[None]:
    """Inside, a job that fails or is told to end leaves no traceback of its launcher."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode if error.returncode > 0 else 128 - error.returncode)
    except Exception as error:
        if hasattr(error, "sigval"):  # torch's SignalException
            sys.exit(128 + error.sigval)
        if hasattr(error, "get_first_failure"):  # torch's ChildFailedError, whose text is its summary
            print(error, file=sys.stderr)
            sys.exit(1)
        raise


def _launch_with_torchrun(arguments: Namespace) -> None:
    """Replaces accelerate's launcher for DeepSpeed: the same variables, and torchrun on each machine."""
    from accelerate.commands.launch import multi_gpu_launcher
    from accelerate.utils import patch_environment
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    several = (arguments.num_machines or 1) > 1
    if several and arguments.deepspeed_multinode_launcher not in (None, "standard"):
        raise ConfigError(
            Problem(
                "deepspeed_multinode_launcher",
                str(arguments.deepspeed_multinode_launcher),
                "starts the other machines with DeepSpeed's own launcher, which is not used here",
                'Set it to "standard" and run the same command on every machine with its --machine_rank.',
            )
        )
    arguments.deepspeed_multinode_launcher = "standard"
    _, environment = prepare_deepspeed_cmd_env(arguments)
    told = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    with patch_environment(**told):
        multi_gpu_launcher(arguments)


def distributed_type(path: Path) -> str | None:
    """What a YAML of accelerate asks for, such as "FSDP"; None if there is none, or accelerate refuses it by itself."""
    from yaml import YAMLError, safe_load

    try:
        said = safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, YAMLError):
        return None
    found = said.get("distributed_type") if isinstance(said, dict) else None
    return None if found is None else str(found)


def _refuse(arguments: Namespace) -> None:
    """Refuse options that would start the script without its configuration, or not at all."""
    if arguments.no_python:
        raise ConfigError(Problem("--no_python", "true", "is no Python script", "Name a script, or -m and a module."))
    from accelerate.commands.config import config_args

    path = Path(arguments.config_file or config_args.default_config_file)
    if arguments.use_fsdp or distributed_type(path) == "FSDP":
        where, said = ("--use_fsdp", "true") if arguments.use_fsdp else (f"{path}: distributed_type", "FSDP")
        fix = (
            f"Take its settings over: `hf-dist config convert {path} --output mine.json`. Write distributed_type: MULTI_GPU "
            "into it, and put -m hf_dist.run --config mine.json before the script."
        )
        raise ConfigError(Problem(where, said, "starts accelerate's own FSDP: hf_dist reads no layout from it", fix))
    if arguments.cpu:
        fix = "Leave it out: without accelerators the processes use the CPU, elsewhere ACCELERATE_USE_CPU=true asks for it."
        raise ConfigError(Problem("--cpu", "true", "makes accelerate drop the rest of its configuration", fix))
