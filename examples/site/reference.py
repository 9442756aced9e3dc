"""Pages of the public names: mkdocstrings fills them from docstrings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from blocks import LONGEST
from document import Page

import hf_dist

MEMBER = 8
"""Lines of a member's name and signature."""
ALONE = "{show_root_heading: false, members: [], inherited_members: false}"
NAMED = "{show_root_heading: true, show_root_full_path: false}"
"""Options of mkdocstrings: a class without its members; a member under its name."""
MEMBERS: dict[str, tuple[str, ...]] = {
    "DistAccelerator": ("engine", "engine_of", "mesh", "draw_alike"),
    "DistArgsMixin": ("dist", "world_size"),
    "DistTrainerMixin": ("checkpoint_writer", "deepspeed", "dist", "dist_engine"),
    "Engine": (
        *("model", "device", "mesh", "optimizer", "train", "eval"),
        *("backward", "step", "zero_grad", "no_sync", "train_batch", "eval_batch", "evaluate"),
        *("clip_grad_norm", "clip_grad_value", "get_global_grad_norm", "get_lr", "loss_scale"),
        *("is_gradient_accumulation_boundary", "set_gradient_accumulation_boundary", "global_steps", "micro_steps"),
        *("step_was_skipped", "skipped_steps", "save_checkpoint", "load_checkpoint", "resident_nbytes"),
    ),
}
"""Class -> what a user calls beyond the stock class: its other public members are called by hf_dist or by Hugging Face."""
STOCK = {
    "DistAccelerator": "All other members are those of accelerate's `Accelerator`, with its arguments.",
    "DistArgsMixin": "All other members are those of the class that it is put before.",
    "DistSeq2SeqTrainer": "Its members are those of the stock class and of [`DistTrainerMixin`](DistTrainerMixin.md).",
    "DistSeq2SeqTrainingArguments": "Its members are those of the stock class and of [`DistArgsMixin`](DistArgsMixin.md).",
    "DistTrainer": "Its members are those of the stock class and of [`DistTrainerMixin`](DistTrainerMixin.md).",
    "DistTrainerMixin": "All other members are those of the Trainer that it is put before, with its arguments.",
    "DistTrainingArguments": "Its members are those of the stock class and of [`DistArgsMixin`](DistArgsMixin.md).",
}
"""Class -> where its other members are described."""


def reference_pages(collect: Callable[[str], Any]) -> list[Page]:
    """A page for each name of `hf_dist.__all__`, and one that lists them. `collect`: gives griffe's object of a path."""
    found = {name: collect(f"hf_dist.{name}") for name in hf_dist.__all__}
    rows = [f"| [`{name}`]({name}.md) | {_first_sentence(thing)} |" for name, thing in found.items()]
    index = "# API\n\nWhat `import hf_dist` offers.\n\n| name | what it is |\n|---|---|\n" + "\n".join(rows) + "\n"
    each = [page for name, thing in found.items() for page in _pages(name, thing)]
    return [Page("api/README.md", "API", index), *each]


def _pages(name: str, thing: Any) -> Iterator[Page]:
    """One page, or as many as the members of a class need."""
    for number, members in enumerate(_groups(name, thing)):
        title = name if number == 0 else f"{name}: {members[0]} to {members[-1]}"
        text = f"# {title}\n\n"
        if number == 0:
            text += _rendered(name, ALONE) + f"{STOCK.get(name, '')}\n\n"
        text += "".join(_rendered(f"{name}.{member}", NAMED) for member in members)
        yield Page(f"api/{name}.md" if number == 0 else f"api/{name}-{number + 1}.md", title, text)


def _rendered(path: str, options: str) -> str:
    return f"::: hf_dist.{path}\n    options: {options}\n\n"


def _groups(name: str, thing: Any) -> Iterator[list[str]]:
    """The members that a class shows, page by page."""
    held, used = list[str](), _height(thing) + MEMBER
    for member in MEMBERS.get(name, ()):
        height = _height(thing.all_members[member]) + MEMBER
        if held and used + height > LONGEST:
            yield held
            held, used = [], 0
        held.append(member)
        used += height
    yield held


def _height(thing: Any) -> int:
    return len(thing.docstring.value.splitlines()) if thing.docstring else 0


def _first_sentence(thing: Any) -> str:
    text = thing.docstring.value.split("\n\n")[0].replace("\n", " ") if thing.docstring else ""
    return text.replace("|", "\\|")
