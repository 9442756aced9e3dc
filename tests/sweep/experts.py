"""Which HF classes have experts that can be spread, against transformers' own plan for experts: every class of three mappings.

    python -m tests.sweep experts [--only PATTERN] [--write]

Each class is built tiny on meta. Equal: the structural rule finds exactly the modules that `ep_plan` hands tokens. Ours only:
finds experts that no plan names. Refused: there are experts, or a plan for some, and none is a stack; the message is shown.
`--write` replaces EXPERTS.md.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from hf_dist.dist.axes import Axes
from hf_dist.errors import HfDistError
from hf_dist.parallel.experts.spread import check_experts, find_experts
from tests.sweep.pipeline import short
from tests.sweep.tiny import VARIANTS, tiny_fields, varied

MAPPINGS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "vision-language": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "sequence to sequence": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
ORDER = ("OTHER", "ours only", "refused", "equal", "not built", "no experts")
TABLE = Path(__file__).parent / "EXPERTS.md"
ROUTED = {
    "+n_routed_experts": 4, "+n_shared_experts": 1, "+num_experts_per_tok": 2, "+n_group": 1, "+topk_group": 1,
    "+moe_intermediate_size": 24,
}  # fmt: skip
"""For classes whose default has none of it."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_EXPERT = re.compile(r"expert|moe|sparsemlp", re.I)


def classes(kind: str) -> list[str]:
    """Of a mapping, each once."""
    values = [name for value in MAPPINGS[kind].values() for name in ([value] if isinstance(value, str) else value)]
    return [name for name in sorted(set(values)) if hasattr(transformers, name)]


def on_meta(name: str) -> Any:
    """A model without memory, tiny, else of its default sizes; an error's text where neither builds."""
    cls, problem = getattr(transformers, name), ""
    for variant in (*VARIANTS, ROUTED, None):
        try:
            fields = {} if variant is None else varied(tiny_fields(cls.config_class()), variant)
            with torch.device("meta"):
                return cls(cls.config_class(**fields))
        except Exception as error:
            problem = problem or short(error)
    return problem


def examine(name: str) -> tuple[str, str]:
    """(outcome, detail) of one class."""
    model = on_meta(name)
    if isinstance(model, str):
        return "not built", model
    found = {_NUMBER.sub("*", path) for path in find_experts(model)}
    there = {_NUMBER.sub("*", path): type(module).__name__ for path, module in model.named_modules()}
    plan = {path for path, what in (getattr(model, "ep_plan", None) or {}).items() if what == "ep_dispatch_experts"}
    plan &= there.keys()
    if found and found == plan:
        return "equal", ", ".join(sorted(found))
    if found:
        kind = "OTHER" if plan else "ours only"
        return kind, ", ".join(sorted(found)) + (f"; the plan: {', '.join(sorted(plan))}" if plan else "")
    if not plan and not any(_EXPERT.search(cls) for cls in there.values()):
        return "no experts", ""
    try:
        check_experts(model, SimpleNamespace(axes=Axes({"dp_shard": 2, "ep": 2})))  # type: ignore[arg-type]
    except HfDistError as error:
        return "refused", short(error)
    return "OTHER", f"neither found nor refused; the plan: {', '.join(sorted(plan))}"


def main(arguments: list[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    rows = [
        (kind, name, *examine(name))
        for kind in MAPPINGS
        for name in classes(kind)
        if re.search(given.only, name) is not None
    ]
    lines = ["# Experts sweep", ""]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    lines += [f"`python -m tests.sweep experts --write`, {versions}, models on meta. {' '.join(_legend())}", ""]
    for kind in MAPPINGS:
        counts = Counter(outcome for where, _, outcome, _ in rows if where == kind)
        lines.append(f"* {kind}: {', '.join(f'{counts[outcome]} {outcome}' for outcome in ORDER)}")
    for outcome in ORDER[:-1]:
        some = [row for row in rows if row[2] == outcome]
        lines += ["", f"## {outcome}: {len(some)}", "", "| class | mapping | |", "|---|---|---|"] if some else []
        lines += [f"| {name} | {kind} | {detail.replace('|', '/')} |" for kind, name, _, detail in some]
    text = "\n".join(lines) + "\n"
    print(text if not given.write else "\n".join(lines[:8]))
    if given.write:
        TABLE.write_text(text, encoding="utf-8")


def _legend() -> list[str]:
    assert __doc__ is not None
    return [line.strip() for line in __doc__.splitlines() if line.startswith(("Each", "finds"))]
