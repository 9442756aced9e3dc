"""The scripts of HF's distributed tests, on two gloo ranks: `python -m tests.ecosystem.hf_distributed --checkout DIR`.

The scripts (`tests/trainer/distributed/scripts`) are not part of this repository. Each runs under torchrun with plain DDP, and
with `hf_dist.run` at ZeRO stages, unchanged. Compared: what they write (losses, evaluations, the log of a resumed run, what
`TrainingArguments` and `Accelerator` say of the ranks), at relative 1e-4, and how often a line is printed. Scripts that check
by themselves have to end well. A tiny model and two small data sets stand under the names that scripts download.
"""

from __future__ import annotations

import argparse
import json
import math
import string
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.ecosystem.hf_suite import STOCK, named_config
from tests.ecosystem.launching import launched

SCRIPTS = "tests/trainer/distributed/scripts"
MODEL, DATA = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5", "wikitext"
TOLERANCE = 1e-4
TRAIN = (
    "--model_dtype fp32 --num_train_epochs 1 --per_device_train_batch_size 4 --learning_rate 1e-3 --adam_epsilon 1e-3"
)
LOSSES = f"{TRAIN} --save_strategy no --logging_steps 1 --loss_output_file losses.json"
SAVED = f"{TRAIN} --num_train_epochs 2 --logging_steps 1 --save_steps 2"


@dataclass(frozen=True)
class Case:
    """One script, started once or more with these words, and the files that it writes below its folder."""

    script: str
    words: tuple[str, ...] = ("",)
    files: tuple[str, ...] = ()
    counted: str = ""
    """A line whose number on standard error is compared."""
    ours: tuple[str, ...] = ()
    """Entries of those files that are ours to choose: what is measured, and which engine runs."""


CASES = {
    "training": Case("train.py", (LOSSES,), ("losses.json",)),
    "accumulation": Case("train.py", (f"{LOSSES} --gradient_accumulation_steps 2",), ("losses.json",)),
    "bf16": Case("train.py", (f"{LOSSES} --bf16 --use_cpu",)),  # autocast there, weights and masters here
    "evaluation": Case("train.py", ("--do_eval --model_dtype fp32 --eval_output_file eval.json",), ("eval.json",)),
    "resume": Case(
        "train.py", (SAVED, f"{SAVED} --resume_from_checkpoint out/checkpoint-2"), ("out/checkpoint-8/trainer_state.json",)
    ),
    "order of predictions": Case("eval_ddp.py"),
    "seeds of workers": Case("worker_seed.py", ("--report_to none",)),
    "streams without dispatch": Case("dispatch_batches.py", ("--report_to none",)),
    "loss over uneven tokens": Case(
        "loss_averaging.py", ("--per_device_train_batch_size 2 --run_both_averaging_modes --adam_epsilon 1e-3",),
        ("out/broken_losses.json", "out/fixed_losses.json"),
    ),
    "what ranks are told": Case(
        "torchrun_env_check.py", files=("out/env_rank0.json", "out/env_rank1.json"), ours=("env_master_port",)
    ),
    **{
        f"log level {name}": Case("train.py", (f"{TRAIN} --save_strategy no {words}",), counted="Running training")
        for name, words in {
            "info": "--log_level info",
            "debug, replicas too": "--log_level debug --log_level_replica debug",
            "error, replicas debug": "--log_level error --log_level_replica debug",
            "error": "--log_level error --log_level_replica error",
        }.items()
    },
}  # fmt: skip
_CLOCK = ("runtime", "per_second", "total_flos", "preparation_time", "log_history.step_time")


def prepare(folder: Path) -> None:
    """The model and the data under the names that the scripts ask for; a local folder comes before the hub."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    letters = ["<pad>", "<eos>", *string.ascii_letters, *string.digits, *string.punctuation, " "]
    raw = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<eos>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tf.utils.logging.disable_progress_bar()
    tf.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder / MODEL
    )
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    torch.manual_seed(0)
    special = dict(pad_token_id=0, eos_token_id=1, bos_token_id=1)
    tf.Qwen2ForCausalLM(tf.Qwen2Config(**sizes, **special, vocab_size=len(letters))).save_pretrained(folder / MODEL)
    data = folder / DATA
    data.mkdir(exist_ok=True)
    rows = [{"text": "the fox and the dog " * (1 + i * i % 7)} for i in range(60)]
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    named = "configs:\n- config_name: wikitext-2-raw-v1\n  data_files: train.jsonl\n"
    (data / "README.md").write_text(f"---\n{named}---\n")


def run(checkout: Path, case: Case, column: str, root: Path) -> dict[str, Any]:
    """What the script wrote, by file; the number of counted lines. Raises `AssertionError` with the end of its errors."""
    folder = Path(tempfile.mkdtemp(dir=root))
    prepare(folder)
    (folder / "out").mkdir()
    ours = [] if column == STOCK else ["-m", "hf_dist.run", *named_config(column, folder)]
    found: dict[str, Any] = {}
    for words in case.words:
        command = [*ours, str(checkout / SCRIPTS / case.script), "--output_dir", "out", *words.split()]
        errors = launched("torchrun", command, folder, is_real=False).stderr
        if case.counted:
            found["lines"] = errors.count(case.counted)
    for name in case.files:
        found |= flat(json.loads((folder / name).read_text()), name)
    return {key: value for key, value in found.items() if not key.endswith((*_CLOCK, *case.ours))}


def flat(value: Any, path: str) -> dict[str, Any]:
    """Every leaf of a JSON value by its path."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for i, inner in enumerate(value) for k, v in flat(inner, f"{path}.{i}").items()}
    return {path: value}


def difference(ours: Mapping[str, Any], stock: Mapping[str, Any]) -> str:
    """How many entries are equal, or the first that is not; entries that only we have are columns of the log."""
    for key, value in stock.items():
        own = ours.get(key)
        numbers = isinstance(value, float) and isinstance(own, (int, float))
        if own != value and not (numbers and math.isclose(own, value, rel_tol=TOLERANCE, abs_tol=1e-7)):
            return f"differs: {key} is {own}, stock {value}"
    return f"equal: {len(stock)} values" if stock else "ended well"


def outcome(checkout: Path, name: str, columns: list[str], root: Path) -> dict[str, str]:
    """By column what came of one case."""
    found: dict[str, str] = {}
    stock: dict[str, Any] = {}
    for column in [STOCK, *columns]:
        try:
            wrote = run(checkout, CASES[name], column, root)
        except AssertionError as error:
            lines = [line.strip() for line in str(error).splitlines() if "Error" in line and "ChildFailed" not in line]
            found[column] = f"failed: {lines[-1][:200] if lines else str(error)[-200:]}"
            continue
        stock = wrote if column == STOCK else stock
        found[column] = "ended well" if column == STOCK else difference(wrote, stock)
    return found


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of transformers")
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 3])
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    given = parser.parse_args()
    columns = [f"stage {stage}" for stage in given.stages]
    print(f"| script | {' | '.join([STOCK, *columns])} |\n|---{'|---' * (len(columns) + 1)}|")
    with tempfile.TemporaryDirectory() as root:
        for name in given.cases:
            found = outcome(given.checkout.absolute(), name, columns, Path(root))
            print(f"| {name} (`{CASES[name].script}`) | {' | '.join(found.values())} |", flush=True)


if __name__ == "__main__":
    main()
