"""Which HF classes split into pipeline stages: every class of five mappings that a tiny config can build.

    python -m tests.sweep pipeline [--stages 2] [--only PATTERN] [--write]

Each class in a process of its own: plain loss and gradients of two microbatches, then the same through the stages. `--write`
replaces PIPELINE.md.
"""

from __future__ import annotations

import argparse
import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_dist.errors import HfDistError
from hf_dist.parallel.pipeline import StagedModel, make_schedule, plan_stages
from tests.parallel.pipeline.local import run_local, summed_gradients
from tests.sweep.in_fork import in_fork
from tests.sweep.tiny import builders, tiny_batches

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
TABLE = Path(__file__).parent / "PIPELINE.md"
SECONDS = 60


def classes() -> Iterator[tuple[str, str]]:
    """(task, class name), each class once."""
    from transformers.models.auto import modeling_auto

    seen = set()
    for task, mapping in MAPPINGS.items():
        for names in getattr(modeling_auto, mapping).values():
            for name in [names] if isinstance(names, str) else names:
                if name not in seen:
                    seen.add(name)
                    yield task, name


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Of one microbatch."""
    return model(**batch).loss


def examine(task: str, name: str, stages: int, built: Callable[[], None]) -> tuple[str, str]:
    """(outcome, detail): equal, refused, WRONG, failed, or not built. `built()` is called when the plain model has run."""
    import transformers

    problem = ""
    for build in builders(getattr(transformers, name)):
        try:
            model: Any = build()
            batches = tiny_batches(task, model)
            losses = [loss_of(model, batch) for batch in batches]
            for loss in losses:
                loss.backward()
            again = [loss_of(model, batch).item() for batch in batches]
            break
        except Exception as error:
            problem = problem or short(error)
    else:
        return "not built", problem
    built()
    if [x.item() for x in losses] != again:
        return "not built", "its loss differs from call to call"
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.numel()}
    model.zero_grad()
    try:
        plan = plan_stages(model, batches[0], stages).plan
    except HfDistError as error:
        return "refused", short(error)
    except Exception as error:
        return "failed", f"planning: {short(error)}"
    try:
        schedule = make_schedule("1f1b", stages, len(batches))
        staged = [StagedModel(build(), plan, schedule.stages_of(rank)) for rank in range(stages)]
        results = run_local(staged, schedule, batches, loss_of)
        return compare(again, results, expected, summed_gradients(staged))
    except HfDistError as error:
        return "refused", f"when running: {short(error)}"
    except Exception as error:
        return "failed", f"running: {short(error)}"


def compare(losses: list[float], results: Any, expected: dict[str, Any], gradients: dict[str, Any]) -> tuple[str, str]:
    """Loss within 1e-5, gradients within 1e-4 of each parameter's largest one."""
    difference = max(abs(a.item() - b) for a, b in zip(results, losses, strict=True))
    worst, where = 0.0, ""
    largest = max((g.abs().max().item() for g in expected.values()), default=0.0)
    for name, gradient in expected.items():
        got = gradients.get(name, torch.zeros_like(gradient))
        # Gradients that are mathematically zero are rounding noise: at least 1e-7 of the model's largest counts as scale.
        scale = max(gradient.abs().max().item(), 1e-3 * largest, 1e-12)
        off = (got - gradient).abs().max().item() / scale
        worst, where = max((worst, where), (off, name))
    if not (difference < 1e-5 and worst < 1e-4):
        return "WRONG", f"loss off by {difference:.1e}, gradient of {where} by {worst:.1e}"
    return "equal", f"{worst:.0e}"


def short(error: BaseException) -> str:
    """Kind and message of an error, in a line that fits into a table."""
    text = re.sub(r"\s+", " ", str(error)).replace("|", "/")
    return f"{type(error).__name__}: {text}"[:230]


def table(rows: list[tuple[str, str, str, str]], stages: int) -> str:
    """The Markdown page."""
    import transformers

    counts = Counter(outcome for _, _, outcome, _ in rows)
    built = len(rows) - counts["not built"]
    share = counts["equal"] / built if built else 0.0
    lines = [
        "# Pipeline sweep",
        "",
        f"`python -m tests.sweep pipeline --stages {stages} --write`, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, CPU, fp32. Two microbatches of different lengths; equal: loss within 1e-5, gradients "
        "within 1e-4 of each parameter's largest one (the number is the worst).",
        "",
        f"{len(rows)} classes, {built} built and run tiny: **{counts['equal']} equal ({share:.1%})**, "
        f"{counts['refused']} refused, {counts['failed']} failed, **{counts['WRONG']} wrong**.",
        "",
    ]
    return "\n".join([*lines, *sections(rows, ("WRONG", "failed", "refused", "equal", "not built"))])


def sections(rows: list[tuple[str, str, str, str]], order: Sequence[str]) -> list[str]:
    """A table for each outcome that occurs, of rows (task, class, outcome, detail)."""
    lines = []
    for outcome in order:
        chosen = [row for row in rows if row[2] == outcome]
        if chosen:
            lines += [f"## {outcome}: {len(chosen)}", "", "| class | mapping | |", "|---|---|---|"]
            lines += [f"| {name} | {task} | {detail} |" for task, name, _, detail in chosen] + [""]
    return lines


def main(arguments: list[str]) -> None:
    """Run the sweep and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep pipeline", description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--only", default="", help="regular expression on the class name")
    parser.add_argument("--write", action="store_true", help=f"replace {TABLE.name}")
    options = parser.parse_args(arguments)
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in (
        "LlamaForCausalLM",
        "MixtralForCausalLM",
        "BertForMaskedLM",
        "BartForConditionalGeneration",
        "ViTModel",
    ):
        getattr(transformers, name)  # a fork has imported what most models import
    rows = []
    for task, name in classes():
        if not re.search(options.only, name):
            continue
        start = time.perf_counter()
        outcome, detail = in_fork(functools.partial(examine, task, name, options.stages), SECONDS)
        rows.append((task, name, outcome, detail))
        print(f"{outcome:10} {task:15} {name:45} {time.perf_counter() - start:5.1f} s  {detail}", flush=True)
    page = table(rows, options.stages)
    print("\n".join(page.splitlines()[4:6]))
    if options.write:
        TABLE.write_text(page, encoding="utf-8")
