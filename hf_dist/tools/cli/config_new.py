"""`hf-dist config new`: a commented config from a few questions or options."""

from __future__ import annotations

import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hf_dist.config import axes_of, load_config, read_config
from hf_dist.config.json_schema import schema_reference
from hf_dist.config.new_file import Choices, new_file
from hf_dist.errors import ConfigError, Problem
from hf_dist.tools.cli.written import to_write, write_texts

__all__ = ["new"]

_QUESTIONS = {
    "stage": (["0", "1", "2", "3"], "What is shared: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights"),
    "precision": (["bf16", "fp16", "fp32"], "Precision (fp16 only for GPUs without bf16)"),
    "offload": (["none", "optimizer", "all"], "What lies in the host's memory (all: optimizer state and weights)"),
    "tensor": (None, "Ranks that share each layer (1: no split)"),
    "sequence": (None, "Ranks that share each sequence, for long rows (1: no split)"),
    "pipeline": (None, "Pipeline stages, for slow networks (1: none)"),
}
"""Field of `Choices` -> the answers (None: a number) and the question."""


def new(
    file: Annotated[Path, typer.Argument(help="Where to write.", callback=to_write("file"))] = Path("hf_dist.json"),
    ranks: Annotated[int | None, typer.Option(help="Processes of the job.", show_default=False, min=1)] = None,
    stage: Annotated[int | None, typer.Option(help="ZeRO stage; default: 3.", show_default=False, min=0, max=3)] = None,
    precision: Annotated[
        Literal["bf16", "fp16", "fp32"] | None, typer.Option(help="Default: bf16.", show_default=False)
    ] = None,
    offload: Annotated[
        Literal["none", "optimizer", "all"] | None,
        typer.Option(help="To the host: the optimizer state, or all of it with the weights.", show_default=False),
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks that share each layer.", show_default=False, min=1)] = None,
    cp: Annotated[int | None, typer.Option(help="Ranks that share each sequence.", show_default=False, min=1)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.", show_default=False, min=1)] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a commented config. Asks in a terminal if no option says what it holds; else what is not given has its default.

    hf-dist config new mine.json --ranks 8 --stage 3 --offload optimizer
    """
    if file.exists() and not force:
        raise ConfigError(Problem("FILE", str(file), "is there already", "Pass --force, or name another file."))
    options = (stage, precision, offload, tp, cp, pp)
    names = (field.name for field in fields(Choices))
    given: dict[str, Any] = {name: value for name, value in zip(names, options, strict=True) if value is not None}
    if not given and _in_terminal():
        given = _asked()
    choices = Choices(**given)
    text = new_file(choices, schema_reference(file))
    config = load_config(read_config(text).data)  # without lines, because nothing is written yet
    if ranks is not None:
        axes_of(config, ranks)  # raises if the axes do not divide them
    write_texts({file: text}, show=True)
    print(f"{file} is written. A training script with the HF Trainer runs with it, unchanged:")
    name = shlex.quote(str(file))
    print(f"  torchrun --nproc_per_node {ranks or max(2, choices.together)} -m hf_dist.run --config {name} train.py")


def _in_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _asked() -> dict[str, Any]:
    """The choices that a user makes in the terminal; Enter takes the default."""
    from rich.prompt import IntPrompt, InvalidResponse, Prompt

    class _Count(IntPrompt):
        def process_response(self, value: str) -> int:
            answer = super().process_response(value)
            if answer < 1 and self.choices is None:
                raise InvalidResponse("[prompt.invalid]A number of ranks is at least 1")
            return answer

    answers: dict[str, Any] = {}
    for field in fields(Choices):
        words, question = _QUESTIONS[field.name]
        if isinstance(field.default, int):
            answers[field.name] = _Count.ask(question, choices=words, default=field.default)
        else:
            answers[field.name] = Prompt.ask(question, choices=words, default=str(field.default))
    return answers
