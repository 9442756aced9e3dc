"""A config file compared with what is known of a job: processes, the script's arguments, the model. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_dist.config import DistConfig, axes_of, examine, resolve, with_disagreements
from hf_dist.errors import ConfigError
from hf_dist.tools.cli.script_arguments import sources_from

__all__ = ["AsJson", "Model", "WorldSize", "as_json_text", "compared"]

WorldSize = Annotated[int | None, typer.Option(help="Processes of the job.", show_default=False, min=1)]
Model = Annotated[str | None, typer.Option(help="A model folder, or an ID of the hub.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def compared(file: Path, script: list[str] | None, world_size: int | None, model: str | None) -> DistConfig:
    """The config, compared with the known facts of the job. One `ConfigError` reports all problems."""
    config, problems = examine(file)
    data_ranks = None
    if world_size is not None:
        try:
            data_ranks = axes_of(config, world_size).size("data")
        except ConfigError as error:
            known = {problem.path for problem in problems}
            problems += [problem for problem in error.problems if problem.path not in known]
    sources = sources_from(script, data_ranks, model)
    facts = script is not None or world_size is not None or model is not None
    if problems:
        if facts:
            problems = with_disagreements(config, sources, problems, ranks_known=data_ranks is not None)
        raise ConfigError(problems)
    return resolve(config, sources) if facts else config


def as_json_text(data: object) -> str:
    """JSON for programs; what JSON has no type for is written as text."""
    return json.dumps(data, indent=2, default=str)
