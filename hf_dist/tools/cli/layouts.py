"""`hf-dist plan --gpus N`: the fastest layouts that fit, why each loses to the first, and their files."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_dist.config import canonical, load_config
from hf_dist.errors import ConfigError, Problem
from hf_dist.tools.cli.planned import EXIT_DOES_NOT_FIT, resolved_config, suggestions
from hf_dist.tools.cli.written import write_texts, writing

if TYPE_CHECKING:
    from hf_dist.planning.found import Found
    from hf_dist.planning.memory_plan import Limits
    from hf_dist.planning.search import Search

__all__ = ["AskedLayouts", "base_of_layouts", "print_layouts"]

_START: dict[str, Any] = {"gradient_clipping": "auto", "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
"""The base config for layouts if no file is named."""
_OF_LAYOUTS = (
    *(
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "pipeline",
        "tensor_parallel",
    ),
    *("expert_parallel", "sequence_parallel_size", "activation_checkpointing", "elasticity"),
)
"""Keys of the file that the search decides."""
_SHOWN = 5


@dataclass(frozen=True)
class AskedLayouts:
    """The command's options."""

    model: str
    config: Path | None
    ranks: int
    ranks_per_machine: int
    seq: int
    global_batch: str | None
    limits: Limits

    @property
    def rows(self) -> int:
        """Rows per step; one per rank if not given."""
        text = self.global_batch
        if text is None:
            return self.ranks
        found = re.fullmatch(r"(\d+)([kKmM]?)(-?tokens)?", text.strip())
        number = int(found[1]) * {"k": 1024, "m": 1024**2}.get(found[2].lower(), 1) if found else 0
        rows = number // self.seq if found and found[3] else number
        if rows < 1:
            expected = f"is not a number of rows, or of tokens for rows of {self.seq}"
            raise ConfigError(Problem("--global-batch", repr(text), expected, "Write 512, or 4M-tokens."))
        return rows


def base_of_layouts(file: Path | Mapping[str, object] | None) -> dict[str, Any]:
    """The config that every layout starts from: that of the file, if there is one, without the keys that the search decides."""
    data = _START if file is None else canonical(file)
    data = {key: value for key, value in data.items() if key not in _OF_LAYOUTS}
    data.setdefault("zero_optimization", {})
    for section, path in (("zero_optimization", "mics_shard_size"), ("hf_dist", "optimizer_over")):
        if section in data:
            data[section] = {key: value for key, value in data[section].items() if key != path}
    return data


def print_layouts(asked: AskedLayouts, model: Any, *, suggest: Path | None, output: Path | None, as_json: bool) -> None:
    """Search, and print the layouts found, then write files. Exit code 3 (`typer.Exit`) if none fits."""
    from hf_dist.planning.describe_layouts import draw_layouts, layout_dict
    from hf_dist.planning.hardware import Hardware
    from hf_dist.planning.layouts import Wanted
    from hf_dist.planning.overhead import estimated, measured_base
    from hf_dist.planning.search import Search

    data = base_of_layouts(asked.config)
    config = resolved_config(load_config(data), 1, 1, model)
    wanted = Wanted(asked.ranks, asked.rows, asked.seq, asked.ranks_per_machine)
    hardware = Hardware(ranks_per_machine=asked.ranks_per_machine)
    beside = functools.partial(estimated, base=measured_base())
    search = Search(model, config, wanted, asked.limits, hardware, beside)
    found = search.best(_SHOWN)
    name = asked.config.stem if asked.config is not None else "layout"
    files = {} if suggest is None else suggestions(name, data, suggest, [each.layout.values for each in found])
    if as_json:
        rows = [layout_dict(each, found[0]) for each in found]
        print(json.dumps({"layouts": rows, "suggestions": [str(file) for file in files]}, indent=2))
    else:
        _print(asked, search, found)
    if not found:
        raise typer.Exit(EXIT_DOES_NOT_FIT)
    write_texts(files)
    if output is not None:
        with writing(output):
            draw_layouts(found, asked.limits.device).save(output)
    if as_json:
        return
    for file, each in zip(files, found, strict=False):
        print(f"wrote {file}: {each.layout.text}")
    if output is not None:
        print(f"wrote {output}")


def _print(asked: AskedLayouts, search: Search, found: list[Found]) -> None:
    from hf_dist.planning.describe_layouts import layout_table, link_lines, other_lines
    from hf_dist.planning.why_none import why_none
    from hf_dist.sharding.wires import wires_for

    hardware = search.hardware
    batch = f"{asked.rows} rows of {asked.seq} tokens a step"
    print(f"{asked.model}: {asked.ranks} GPUs, {asked.ranks_per_machine} on a machine, {batch}, {search.config.dtype}")
    if not found:
        print(f"{why_none(search)}\nUse more GPUs, shorter rows, a smaller batch, or offload in --config.")
        return
    more = [
        *search.eights_lines(found[0]),
        *other_lines(search.of_other_axes(found), found[0]),
        *link_lines(found[0], wires_for(search.config), hardware),
    ]
    print("\n".join([*layout_table(found), *more]))
    print("microbatches: rows x number of a step. Run again: selective is all but matrix products and attention.")
    links = f"{hardware.inside / 1e9:.0f} GB/s inside, {hardware.between / 1e9:.0f} between"
    eights = f" ({hardware.float8_rows / 1e12:.0f} to {hardware.float8 / 1e12:.0f} in float8)" if search.eights else ""
    speeds = f"{hardware.flops / 1e12:.0f} TFLOP/s{eights}, {links}"
    print(f"bytes are per rank and step; times come from a model ({speeds}): only ratios are meaningful.")
    print("Measure with `hf-dist tune`.")
