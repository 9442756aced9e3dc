"""`hf-dist config`: is this file valid, what does it mean, and how does another tool's file look here? No torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_dist.config import (
    differences,
    format_table,
    load_config,
    similar_files,
)
from hf_dist.config.convert import Conversion, from_fsdp_arguments
from hf_dist.config.convert_recipes import from_any
from hf_dist.config.json_schema import json_schema
from hf_dist.errors import ConfigError, Problem
from hf_dist.tools.cli.compared import AsJson, Model, WorldSize, as_json_text, compared
from hf_dist.tools.cli.config_new import new
from hf_dist.tools.cli.explain import explain
from hf_dist.tools.cli.written import to_write, write_texts

__all__ = ["app"]

app = typer.Typer(
    help="Make or check a config, and say what it means.", no_args_is_help=True, pretty_exceptions_enable=False
)
app.command()(new)
app.command()(explain)

File = Annotated[Path, typer.Argument(help="A DeepSpeed-style JSON file.", show_default=False)]
Script = Annotated[
    list[str] | None,
    typer.Argument(help="After `--`: the arguments of your script, compared with the file.", show_default=False),
]


@app.command()
def check(
    file: File, script: Script = None, world_size: WorldSize = None, model: Model = None, as_json: AsJson = False
) -> None:
    """Report everything that is wrong with a config, alone or together with a script's arguments. Exit code 1 on any problem.

    hf-dist config check zero3.json --world-size 8 -- --learning_rate 2e-5 --per_device_train_batch_size 4
    """
    try:
        config = compared(file, script, world_size, model)
    except ConfigError as error:
        if not as_json:
            raise
        print(as_json_text({"file": str(file), "ok": False, "problems": [vars(problem) for problem in error.problems]}))
        sys.exit(1)
    if as_json:
        values = {path: {"value": config.value_at(path), "source": source} for path, source in config.sources.items()}
        notes = [vars(note) for note in config.notes]
        differs = [vars(each) for each in differences(config)]
        print(
            as_json_text(
                {"file": str(file), "ok": True, "problems": [], "notes": notes, "values": values, "differs": differs}
            )
        )
    else:
        print(format_table(config))
        print(f"No problem: {file} is valid.")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the config. Name it in "$schema", and editors complete keys and check values."""
    print(as_json_text(json_schema()))


@app.command()
def convert(
    source: Annotated[
        Path | None, typer.Argument(help="accelerate's YAML, or another tool's file.", show_default=False)
    ] = None,
    fsdp: Annotated[str | None, typer.Option(help='The value of --fsdp, e.g. "full_shard auto_wrap".')] = None,
    fsdp_config: Annotated[Path | None, typer.Option(help="The JSON of --fsdp_config.", show_default=False)] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to write; default: print.", show_default=False, callback=to_write("file"))
    ] = None,
) -> None:
    """Create a config from accelerate's YAML, the Trainer's fsdp arguments, or the layout keys of another tool's file.

    Read, by their keys: accelerate's YAML (deepspeed_config or fsdp_config), the arguments of an FSDP plugin, transformers'
    DistributedConfig (its JSON, or a config.json with that section), torchtitan's TOML, Axolotl's YAML. What has no
    counterpart is listed.
    """
    conversion = _converted(source, fsdp, fsdp_config)
    text = as_json_text(conversion.config)
    if output is None:
        print(text)
    else:
        write_texts({output: text + "\n"}, show=True)
    for key, reason in conversion.notes.items():
        print(f"{key}: {reason}", file=sys.stderr)
    load_config(conversion.config)  # reports, by path, what is not available


def _converted(source: Path | None, fsdp: str | None, fsdp_config: Path | None) -> Conversion:
    if (source is None) == (fsdp is None):
        raise ConfigError(Problem("convert", "", "needs a file of another tool or --fsdp", "Pass one of the two."))
    if source is None:
        section = {} if fsdp_config is None else _other_file(fsdp_config)
        return from_fsdp_arguments(str(fsdp), section)
    return from_any(_other_file(source))


def _other_file(source: Path) -> dict[str, Any]:
    """The content of a YAML, JSON or TOML file."""
    import yaml

    try:
        text = source.read_text(encoding="utf-8")
        data = _toml(text) if source.suffix == ".toml" else yaml.safe_load(text)
    except FileNotFoundError:
        raise ConfigError(Problem("source", str(source.absolute()), "does not exist", similar_files(source))) from None
    except OSError as error:
        raise ConfigError(Problem("source", str(source), f"cannot be read: {error.strerror}", "")) from None
    except (ValueError, yaml.YAMLError) as error:  # a TOMLDecodeError is a ValueError
        raise ConfigError(Problem("source", str(source), f"cannot be read: {error}", "")) from None
    if not isinstance(data, dict):
        raise ConfigError(
            Problem("source", str(source), "is not a mapping", "Pass the file of accelerate or a recipe.")
        )
    return data


def _toml(text: str) -> object:
    if sys.version_info < (3, 11):
        raise ConfigError(
            Problem("source", "", "is TOML, which Python reads since 3.11", "Convert it with a newer Python.")
        )
    import tomllib

    return tomllib.loads(text)
