"""Which arguments and outputs of a class are the plain model's in a layout: labels and inputs of its signature, all outputs.

    python -m tests.sweep arguments --layout tp|pp|cp [--only PATTERN] [--seconds N] [--results FILE] [--write]

Each class is split as a job splits it (a plan made and verified with one batch), and is then called with each argument that
its forward names. Verified: outputs and gradients of every parameter are the plain model's. Refused: an error by name, at the
call or where an output is read. Unknown: no value of ours runs in the plain model. `--results` keeps the rows between calls,
`--write` replaces the layout's part of ARGUMENTS.md.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hf_dist.errors import HfDistError
from tests.sweep import pipeline, sharding
from tests.sweep.in_fork import in_fork
from tests.sweep.layouts import Layout, cut, parted, plain, staged
from tests.sweep.pipeline import short
from tests.sweep.sequence import AllDouble
from tests.sweep.signature import Batch, Call, first_batch, named, not_taken, trials
from tests.sweep.tiny import builders

PAGE = Path(__file__).parent / "ARGUMENTS.md"
MAPPINGS = {
    "pretraining": "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "answers": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}
"""Beside those of the other sweeps, for their labels."""
TOLERANCE = {"outputs": 1e-4, "gradients": 1e-3}
"""Relative to the norm of an output, to the largest element of a gradient."""
WORDS = ("WRONG", "raw", "refused", "unknown", "not taken", "verified")
"""What is found about a name, the worst first. Raw: an error that is not ours, where the plain model runs."""
NO_VALUE = ("unknown", "not taken")
CROSSING = "+cross-attention"
"""After the name of a class whose config has `add_cross_attention`: built with it."""


def classes() -> Iterator[tuple[str, str]]:
    """(task, class name), each class once."""
    from transformers.models.auto import modeling_auto

    seen = set()
    for task, name in pipeline.classes():
        seen.add(name)
        yield task, name
    for name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        if _may_cross(name):
            yield "causal", name + CROSSING
    for task, mapping in MAPPINGS.items():
        for names in getattr(modeling_auto, mapping).values():
            for name in [names] if isinstance(names, str) else names:
                if name not in seen:
                    seen.add(name)
                    yield task, name


def _may_cross(name: str) -> bool:
    import transformers

    try:
        model_class = getattr(transformers, name)
        takes = inspect.signature(model_class.forward).parameters
        return "encoder_hidden_states" in takes and hasattr(model_class.config_class(), "add_cross_attention")
    except Exception:  # its default config is not valid
        return False


# ---- one class


def examine(task: str, name: str, layout: Callable[[Callable[[], Any], Batch], Layout]) -> tuple[str, str]:
    """(outcome, detail) of one class: `equal` or `WRONG` with the words as JSON; refused, failed or not built with why."""
    built = first_running(task, name)
    if isinstance(built, str):
        return "not built", built
    build, model, batch = built
    try:
        words = words_of(model, batch, layout(build, batch))
        if any(word == "WRONG" for word, _ in words.values()):
            words = without_rounding(words, lambda: in_double(task, build, layout))
    except HfDistError as error:
        return "refused", short(error)
    except Exception as error:
        return "failed", short(error)
    return judged(words)


def first_running(task: str, name: str) -> tuple[Callable[[], Any], Any, Batch] | str:
    """(how it is built, the model, its batch) of the first tiny copy that trains on its batch; why there is none."""
    import transformers

    problem = ""
    try:
        extra = {"is_decoder": True, "add_cross_attention": True} if name.endswith(CROSSING) else {}
        candidates = list(builders(getattr(transformers, name.removesuffix(CROSSING)), extra))
    except Exception as error:  # its default config is not valid
        return short(error)
    for candidate in candidates:
        build = functools.partial(sharding.fresh, candidate)
        try:
            model = build()
            batch = first_batch(task, model)
            plain(model, *_first_trial(model, batch))
            return build, model, batch
        except Exception as error:
            problem = problem or short(error)
    return problem


Words = dict[str, tuple[str, str]]
"""Name of an argument, or "-> " and that of an output -> (word, why)."""


def in_double(task: str, build: Callable[[], Any], layout: Callable[[Callable[[], Any], Batch], Layout]) -> Words:
    """The words of the same class in fp64."""

    def doubled() -> Any:
        return build().double()

    torch.set_default_dtype(torch.float64)
    try:
        with AllDouble():
            model = doubled()
            batch = first_batch(task, model)
            return words_of(model, batch, layout(doubled, batch))
    finally:
        torch.set_default_dtype(torch.float32)


def without_rounding(words: Words, again: Callable[[], Words]) -> Words:
    """What is wrong in fp32 and right in fp64 is the rounding of fp32: verified, with what was off."""
    doubles = again()
    found: Words = {}
    for name, (word, why) in words.items():
        twice, reason = doubles.get(name, ("WRONG", ""))
        is_rounding = word == "WRONG" and twice not in ("WRONG", "raw")
        found[name] = (twice, reason or f"rounding: {why}") if is_rounding else (word, why)
    return found


def _first_trial(model: Any, batch: Batch) -> tuple[Call, Batch]:
    _, _, call, given = next(trials(model, batch))
    return call, given


def words_of(model: Any, batch: Batch, split: Layout) -> Words:
    """What is found about every argument and output."""
    words: Words = {}

    def say(name: str, word: str, why: str = "") -> None:
        if name not in words or WORDS.index(word) < WORDS.index(words[name][0]) or words[name][0] in NO_VALUE:
            words[name] = (word, why)

    takes = named(model)
    for argument, variant, call, given in trials(model, batch):
        names = [argument] if argument else [n for n in takes if n in given]
        try:
            plain(model, call, given)
        except Exception as error:
            for each in names:
                if each not in words:
                    say(each, "not taken" if isinstance(error, NotImplementedError) else "unknown", short(error))
            continue
        outputs, (word, why) = compared(model, call, given, split)
        for each in names:
            say(each, word, f"{variant}: {why}" if variant and why else why)
        for output, (heard, reason) in outputs.items():
            if argument != "return_dict":
                say(f"-> {output}", heard, reason)
    for argument in dict.fromkeys([*takes, *(name for name in words if not name.startswith("-> "))]):
        words.setdefault(argument, ("unknown", "no value is made for it"))
        why = not_taken(type(model).__name__, argument)
        if words[argument][0] in NO_VALUE and why:
            words[argument] = ("not taken", why)
    return words


def compared(model: Any, call: Call, given: Batch, split: Layout) -> tuple[dict[str, tuple[str, str]], tuple[str, str]]:
    """(word of each output, word of the whole call)."""
    try:
        found = split(call, given)
    except HfDistError as error:
        return {}, ("refused", short(error))
    except Exception as error:
        return {}, ("raw", short(error))
    expected = plain(model, call, given, frozenset(found.refused))
    outputs: dict[str, tuple[str, str]] = {name: ("refused", why) for name, why in found.refused.items()}
    wrong = ""
    for name, wanted in expected.outputs.items():
        off = difference(found.outputs.get(name), wanted)
        word = "verified" if off < TOLERANCE["outputs"] else "WRONG"
        top = name.partition(".")[0]
        if outputs.get(top, ("verified", ""))[0] == "verified":
            outputs[top] = (word, f"off by {off:.1e}" if word == "WRONG" else "")
    largest = max((float(g.abs().max()) for g in expected.gradients.values() if g.numel()), default=0.0)
    for name, gradient in expected.gradients.items():
        if not gradient.numel():
            continue
        scale = max(float(gradient.abs().max()), 1e-3 * largest, 1e-12)
        got = found.gradients.get(name, torch.zeros_like(gradient))
        off = float((got - gradient).abs().max()) / scale
        if not off < TOLERANCE["gradients"]:
            wrong = wrong or f"gradient of {name} off by {off:.1e}"
    return outputs, ("WRONG", wrong) if wrong else ("verified", "")


def difference(found: torch.Tensor | None, wanted: torch.Tensor) -> float:
    """Relative; infinite for another shape."""
    if found is None or found.shape != wanted.shape:
        return float("inf")
    both_open = torch.isinf(found) & torch.isinf(wanted) & (found.sign() == wanted.sign())
    a, b = (x.double().masked_fill(both_open, 0.0) for x in (found, wanted))
    off = float((a - b).norm() / b.norm().clamp(min=1e-9))
    return off if off == off else float("inf")


def judged(words: Words) -> tuple[str, str]:
    """An outcome of the sweeps, and the words as JSON."""
    bad = any(word in ("WRONG", "raw") for word, _ in words.values())
    return "WRONG" if bad else "equal", json.dumps(words)


def on_ranks(task: str, name: str, rank: int, mesh: Any, config: Any) -> tuple[tuple[str, str], bool]:
    """As `sharding.examine`: the outcome for split sequences, and whether the ranks are fit for the next class."""
    outcome = examine(task, name, functools.partial(parted, mesh=mesh))
    return outcome, "raw" not in outcome[1] and outcome[0] in ("equal", "not built")


SECONDS = 240
HERE = {"tp": cut, "pp": staged}


# ---- the page


def section(layout: str, rows: dict[str, list[str]]) -> list[str]:
    """A layout's part of the page: names by their words, then the classes of which something is refused or not known."""
    split = {name: json.loads(row[2]) for name, row in rows.items() if row[1] in ("equal", "WRONG")}
    whole = Counter(row[1] for row in rows.values())
    by_name: dict[str, Counter[str]] = {}
    for words in split.values():
        for name, (word, _) in words.items():
            by_name.setdefault(name, Counter())[word] += 1
    counts = Counter(word for words in split.values() for word, _ in words.values())
    lines = [
        f"## {TITLES[layout]}",
        "",
        f"{len(split)} classes are split, {whole['refused']} refused as a whole, {whole['failed']} failed, "
        f"{whole['not built']} not built. Of {sum(counts.values())} names of arguments and outputs {counts['verified']} are "
        f"verified, {counts['refused']} refused, {counts['not taken']} not taken, {counts['unknown']} unknown, "
        f"{counts['raw']} end in an error not ours, "
        f"**{counts['WRONG']} are wrong**.",
        "",
        *[f"Failed: {name} ({row[2].strip()[:80]})." for name, row in rows.items() if row[1] == "failed"],
        "",
        "| name | verified | refused | not taken | unknown |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, found in sorted(by_name.items(), key=lambda item: (-sum(item[1].values()), item[0])):
        lines.append(
            f"| `{name}` | {found['verified']} | {found['refused']} | {found['not taken']} | {found['unknown']} |"
        )
    lines += ["", "| class | verified | refused | not taken | unknown |", "|---|---|---|---|---|"]
    for name, words in split.items():
        of = {word: [f"`{n}`" for n, (heard, _) in words.items() if heard == word] for word in WORDS}
        bad = [f"**{word}: {n} ({words[n][1]})**" for word in ("WRONG", "raw") for n in words if words[n][0] == word]
        if len(of["verified"]) < len(words):
            cells = (
                str(len(of["verified"])),
                " ".join(of["refused"]),
                " ".join(of["not taken"]),
                " ".join([*of["unknown"], *bad]),
            )
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


TITLES = {"cp": "Split sequences (cp 2)", "tp": "Split tensors (tp 2)", "pp": "Stages (pp 2)"}
HEAD = (
    "Every label and input that a class's forward names, and every output, in a layout that was verified with one batch: each "
    "argument is given in turn, the objective is the loss and the squares of all other outputs. Verified: every output and the "
    "gradient of every parameter are the plain model's (1e-4 of an output's norm, 1e-3 of a gradient's largest element, fp32). "
    "Refused: an error by name, at the call or where the output is read. Not taken: the class names it and cannot use it (its "
    "own error, or a part that its config lacks: `NOT_TAKEN` in `signature.py`). Unknown: no value of ours runs in the plain "
    "model. `+cross-attention`: built with `add_cross_attention`. An arrow stands before the name of an output. Classes of "
    "which all is verified have no row."
)


def page(layout: str, rows: dict[str, list[str]]) -> str:
    """The whole page, with the parts of the other layouts as they are."""
    import transformers

    parts = {}
    if PAGE.exists():
        for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
            parts[next(key for key, title in TITLES.items() if part.startswith(title))] = (
                f"## {part}".rstrip().splitlines()
            )
    parts[layout] = section(layout, rows)
    lines = [
        "# Arguments sweep",
        "",
        f"`python -m tests.sweep arguments --layout {'|'.join(TITLES)} --write`, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, CPU. {HEAD}",
        "",
    ]
    for key in TITLES:
        lines += [*parts.get(key, []), ""]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str]) -> None:
    """Run the sweep of one layout."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep arguments", description=__doc__)
    parser.add_argument("--layout", choices=TITLES, required=True)
    parser.add_argument("--only", default="", help="regular expression on the class name")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no class after this many")
    parser.add_argument("--results", type=Path, help="JSON file with rows of earlier calls, which is added to")
    parser.add_argument("--write", action="store_true", help=f"replace the layout's part of {PAGE.name}")
    options = parser.parse_args(arguments)
    import transformers

    transformers.logging.set_verbosity_error()
    for known in (
        "LlamaForCausalLM",
        "MixtralForCausalLM",
        "BertForMaskedLM",
        "BartForConditionalGeneration",
        "ViTModel",
    ):
        getattr(transformers, known)  # a fork has imported what most models import
    rows: dict[str, list[str]] = {}
    if options.results and options.results.exists():
        rows = json.loads(options.results.read_text(encoding="utf-8"))
    begun = time.monotonic()
    pool: Any = None
    for task, name in classes():
        if name in rows or not re.search(options.only, name):
            continue
        if time.monotonic() - begun > options.seconds:
            print("time is over: call again with the same --results")
            break
        if options.layout == "cp":
            pool = pool if pool and pool.left else sharding.Pool({"sequence_parallel_size": 2}, on_ranks)
            rows[name] = [task, *pool.examine(task, name)]
            if not pool.left:
                pool.close()
        else:
            work = functools.partial(_examined, task, name, HERE[options.layout])
            rows[name] = [task, *in_fork(work, SECONDS)]
        if options.results:
            options.results.write_text(json.dumps(rows, indent=0), encoding="utf-8")
        print(f"{rows[name][1]:10} {task:15} {name:45} {rows[name][2][:200]}", flush=True)
    if pool:
        pool.close()
    text = page(options.layout, rows)
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print("\n".join(section(options.layout, rows)[:4]))


def _examined(task: str, name: str, layout: Any, built: Callable[[], None]) -> tuple[str, str]:
    built()
    return examine(task, name, layout)
