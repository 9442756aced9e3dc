"""Which HF classes are split between ranks, and rightly: every class of three mappings that a tiny config can build.

    python -m tests.sweep tensor [--size 2] [--only PATTERN] [--seconds N] [--results FILE] [--write]

Each class in a process of its own, ranks are threads. The plan is chosen and verified as a job does it; then it is used on
other batches than it was verified with. `--results` keeps the rows between calls, `--write` replaces TENSOR.md, with
`--size 4` TENSOR_4.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_dist.errors import HfDistError
from tests.sweep.in_fork import in_fork
from tests.sweep.pipeline import classes, sections, short
from tests.sweep.tiny import builders

TABLES = {2: "TENSOR.md", 4: "TENSOR_4.md"}
"""By the number of ranks."""
TASKS = ("causal", "masked", "classification")
SECONDS = 240
ORDER = ("WRONG", "failed", "refused", "equal", "not built")


def examine(name: str, size: int, built: Callable[[], None]) -> tuple[str, str]:
    """(outcome, detail) of one class. `built()` is called when the plain model has run."""
    import transformers

    from hf_dist.parallel.tensor.choose import choose_plan
    from hf_dist.parallel.tensor.verify import compute
    from hf_dist.sharding.units import find_unit_modules

    problem = ""
    try:
        candidates = list(builders(getattr(transformers, name)))
    except Exception as error:  # its default config is not valid
        return "not built", short(error)
    for build in candidates:
        try:
            model = build()
            compute(model)
            break
        except Exception as error:
            problem = problem or short(error)
    else:
        return "not built", problem
    built()
    try:
        plan = choose_plan(model, size, find_unit_modules)
        return on_other_batches(model, plan, size)
    except HfDistError as error:
        return "refused", short(error)
    except Exception as error:
        return "failed", short(error)


def on_other_batches(model: Any, plan: Any, size: int) -> tuple[str, str]:
    """The plan on rows that it was not verified with: equal or WRONG, and the share of the elements that it cuts."""
    from hf_dist.parallel.tensor.plan import pattern_of
    from hf_dist.parallel.tensor.verify import Difference, compute, verified
    from hf_dist.sharding.units import find_unit_modules

    g = torch.Generator().manual_seed(11)
    vocabulary = min(getattr(model.config.get_text_config(), "vocab_size", 128) or 128, 128)
    batches = [
        {"input_ids": torch.randint(4, vocabulary - 8, (n, length), generator=g)} for n, length in ((3, 9), (1, 16))
    ]
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    choose = getattr(model, "set_experts_implementation", None)
    if choose is not None and any("experts" in name for name, _ in model.named_modules()):
        choose("eager")
    total = sum(p.numel() for p in model.parameters())
    cut = sum(p.numel() for n, p in model.named_parameters() if pattern_of(n) in plan.params)
    try:
        verified(plan, compute(model, batches), size, find_unit_modules)
    except Difference as error:
        return "WRONG", short(error)
    source = (
        "derived" if plan.source == "derived" else "tp_plan" + (", completed" if "completed" in plan.source else "")
    )
    return "equal", f"{source}: {cut / total:.0%} of the elements are cut"


def table(rows: dict[str, list[str]], size: int) -> str:
    """The Markdown page."""
    import transformers

    listed = [(rows[name][0], name, rows[name][1], rows[name][2]) for _, name in classes() if name in rows]
    lines = [
        "# Tensor sweep",
        "",
        f"`python -m tests.sweep tensor --size {size} --write`, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, CPU, fp32, {size} threads as ranks. Equal: loss within 1e-5, every gradient within "
        "1e-4 of its largest element, on other batches than those that the plan was verified with.",
        "",
    ]
    for task in TASKS:
        counts = Counter(outcome for kind, _, outcome, _ in listed if kind == task)
        built = sum(counts.values()) - counts["not built"]
        lines.append(
            f"* {task}: {built} built tiny, **{counts['equal']} equal**, {counts['refused']} refused, "
            f"{counts['failed']} failed, **{counts['WRONG']} wrong**"
        )
    return "\n".join([*lines, "", *sections(listed, ORDER)])


def main(arguments: list[str]) -> None:
    """Run the sweep and print the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep tensor", description=__doc__)
    parser.add_argument("--size", type=int, default=2, choices=TABLES)
    parser.add_argument("--only", default="", help="regular expression on the class name")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no class after this many")
    parser.add_argument("--results", type=Path, help="JSON file with rows of earlier calls, which is added to")
    parser.add_argument("--write", action="store_true", help="replace the page of that size")
    options = parser.parse_args(arguments)
    import transformers

    transformers.logging.set_verbosity_error()
    for name in ("LlamaForCausalLM", "MixtralForCausalLM", "BertForMaskedLM"):
        getattr(transformers, name)  # a fork has imported what most models import
    rows: dict[str, list[str]] = {}
    if options.results and options.results.exists():
        rows = json.loads(options.results.read_text(encoding="utf-8"))
    start = time.monotonic()
    for task, name in classes():
        if task not in TASKS or name in rows or not re.search(options.only, name):
            continue
        if time.monotonic() - start > options.seconds:
            print("time is over: call again with the same --results")
            break
        begun = time.monotonic()
        rows[name] = [task, *in_fork(functools.partial(examine, name, options.size), SECONDS)]
        if options.results:
            options.results.write_text(json.dumps(rows, indent=0), encoding="utf-8")
        print(f"{rows[name][1]:10} {task:15} {name:45} {time.monotonic() - begun:5.1f} s  {rows[name][2]}", flush=True)
    page = table(rows, options.size)
    print("\n".join(page.splitlines()[4:8]))
    if options.write:
        Path(__file__).with_name(TABLES[options.size]).write_text(page, encoding="utf-8")
