"""Hugging Face's own example scripts, as they are, at ZeRO-3 on two ranks against plain DDP.

They are not part of this repository: `HF_DIST_HF_EXAMPLES` names the folder `examples/pytorch` of a checkout of transformers
(a script refuses an installed version that is too old for it). Without it the tests are skipped; a script that is not there,
or whose libraries are not installed, is skipped by name. A library may lie beside the script that needs it.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.ecosystem.launching import launch
from tests.ecosystem.on_ranks import collected
from tests.ecosystem.tiny import save_example_data, save_example_models, save_models

EXAMPLES = Path(os.environ.get("HF_DIST_HF_EXAMPLES", "")).absolute()
pytestmark = [
    pytest.mark.skipif(not os.environ.get("HF_DIST_HF_EXAMPLES"), reason="HF_DIST_HF_EXAMPLES names no checkout"),
    pytest.mark.timeout(900),
]
TRAINING = [
    *("--max_steps", "3", "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2", "--do_train"),
    *("--do_eval", "--learning_rate", "5e-3", "--adam_epsilon", "1e-3", "--logging_steps", "1", "--report_to", "none"),
    *("--save_strategy", "no", "--use_cpu", "--disable_tqdm", "True", "--seed", "5", "--max_grad_norm", "0.5"),
]
# These models return a mean over the microbatch: HF multiplies it by the ranks unless it is told not to.
MEAN = ["--average_tokens_across_devices", "False"]
LOOP = [
    *("--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2", "--learning_rate", "5e-3"),
    *("--num_train_epochs", "2", "--seed", "5", "--num_warmup_steps", "1", "--checkpointing_steps", "2"),
]
TEXT = ["--train_file", "text.txt", "--validation_file", "text.txt", "--block_size", "16"]
LABELLED = ["--train_file", "labelled.json", "--validation_file", "labelled_8.json"]
SQUAD = ["--train_file", "squad.json", "--validation_file", "squad_8.json", "--max_seq_length", "24"]
PAIRS = ["--train_file", "pairs.json", "--validation_file", "pairs_8.json", "--test_file", "pairs_8.json"]
GENERATED = ["--max_source_length", "16", "--max_target_length", "8", "--predict_with_generate", "--do_predict"]
PICTURES = ["--train_dir", "pictures/train", "--validation_dir", "pictures/validation"]
SCRIPTS: dict[str, list[str]] = {
    "language-modeling/run_clm.py": [
        *TRAINING, *TEXT, "--model_name_or_path", "lm", "--gradient_accumulation_steps", "2",
    ],
    "language-modeling/run_clm_no_trainer.py": [
        *LOOP, *TEXT, "--model_name_or_path", "lm", "--gradient_accumulation_steps", "2",
    ],
    "language-modeling/run_mlm.py": [
        *TRAINING, *MEAN, *TEXT[:4], "--model_name_or_path", "encoder", "--max_seq_length", "16",
    ],
    "text-classification/run_glue.py": [
        *TRAINING, *MEAN, *LABELLED, "--model_name_or_path", "encoder", "--max_seq_length", "16",
    ],
    "text-classification/run_glue_no_trainer.py": [
        *LOOP, *LABELLED, "--model_name_or_path", "encoder", "--max_length", "16", "--gradient_accumulation_steps", "2",
    ],
    "question-answering/run_qa.py": [*TRAINING, *MEAN, *SQUAD, "--model_name_or_path", "encoder", "--doc_stride", "4"],
    "question-answering/run_qa_no_trainer.py": [
        *LOOP, *SQUAD, "--model_name_or_path", "encoder", "--doc_stride", "4", "--gradient_accumulation_steps", "2",
    ],
    "translation/run_translation.py": [
        *TRAINING, *MEAN, *PAIRS, *GENERATED, "--model_name_or_path", "seq2seq", "--source_lang", "en", "--target_lang",
        "de", "--num_beams", "2",
    ],
    "translation/run_translation_no_trainer.py": [
        *LOOP, *PAIRS[:4], "--model_name_or_path", "seq2seq", "--source_lang", "en", "--target_lang", "de",
        "--max_source_length", "16", "--max_target_length", "8", "--num_beams", "2", "--pad_to_max_length", "True",
    ],
    "image-classification/run_image_classification.py": [
        *TRAINING, *MEAN, *PICTURES, "--model_name_or_path", "vision", "--remove_unused_columns", "False",
    ],
}  # fmt: skip
NO_GRADIENT = ("key.bias", "qa_outputs.bias", "bert.encoder.layer.1.output.LayerNorm.bias")
"""Parameters whose gradient is zero but for rounding (the same number is added to all logits of a softmax; the last one in
question answering only). A loop's AdamW, whose epsilon is small, makes steps of the rounding."""
LIBRARIES = {"image-classification": "torchvision"}
CASES = [(script, "torchrun") for script in SCRIPTS] + [(script, "accelerate") for script in list(SCRIPTS)[:2]]


RESUMABLE = [script for script in SCRIPTS if script.endswith("_no_trainer.py") and "run_glue" not in script]
"""Without the loop whose windows are counted by hand, from zero again after a resume."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, data and metrics."""
    made = tmp_path_factory.mktemp("examples")
    save_models(made)
    save_example_models(made)
    save_example_data(made)
    (made / "zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    return made


def _is_loop(script: str) -> bool:
    return script.endswith("_no_trainer.py")


def _run(script: str, launcher: str, folder: Path, root: Path, *more: str, sharded: bool = True) -> None:
    given = [str(EXAMPLES / script), *SCRIPTS[script], "--output_dir", str(folder), *more]
    if sharded:
        named = ["--config", "zero3.json"] if _is_loop(script) else []
        given = ["-m", "hf_dist.run", *named, *given, *([] if named else ["--deepspeed", "zero3.json"])]
    launch(launcher, given, root, timeout=400)


@pytest.fixture(scope="module")
def under_ddp(root: Path) -> Any:
    """`under_ddp(script)`: the folder that the script writes without us."""

    @functools.cache
    def run(script: str) -> Path:
        folder = root / "ddp" / Path(script).stem
        _run(script, "torchrun", folder, root, sharded=False)
        return folder

    return run


def _skip_what_is_missing(script: str) -> None:
    if not (EXAMPLES / script).exists():
        pytest.skip(f"{EXAMPLES} has no {script}")
    library = LIBRARIES.get(Path(script).parent.name)
    if library is not None:
        tried = subprocess.run([sys.executable, "-c", f"import {library}"], cwd=(EXAMPLES / script).parent, check=False)
        if tried.returncode:
            pytest.skip(f"{script} needs {library}")


@pytest.mark.parametrize(("script", "launcher"), CASES)
def test_gives_the_numbers_of_ddp(script: str, launcher: str, root: Path, under_ddp: Any) -> None:
    _skip_what_is_missing(script)
    folder = root / launcher / Path(script).stem
    _run(script, launcher, folder, root)
    _compare(under_ddp(script), folder, needs_losses=not _is_loop(script))


@pytest.mark.parametrize("script", RESUMABLE)
def test_a_resumed_loop_ends_like_one_that_was_not_interrupted(script: str, root: Path, under_ddp: Any) -> None:
    _skip_what_is_missing(script)
    folder, whole = (root / name / Path(script).stem for name in ("resumed", "torchrun"))
    if not (whole / "step_2").exists():
        _run(script, "torchrun", whole, root)
    _run(script, "torchrun", folder, root, "--resume_from_checkpoint", str(whole / "step_2"))
    _compare(under_ddp(script), folder, needs_losses=False)


def _compare(plain: Path, sharded: Path, *, needs_losses: bool) -> None:
    """Numbers, predictions and weights of a script's two output folders."""
    expected, found = collected(plain), collected(sharded)
    assert expected["numbers"]
    assert not needs_losses or len(expected["numbers"]["loss"]) == 3
    for key, value in expected["numbers"].items():
        assert found["numbers"][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    assert set(expected["files"]) <= set(found["files"])
    for name in set(expected["files"]) & {"generated_predictions.txt", "eval_predictions.json"}:
        assert (sharded / name).read_text() == (plain / name).read_text(), name
    weights = load_file(sharded / "model.safetensors")
    for name, weight in load_file(plain / "model.safetensors").items():
        if not name.endswith(NO_GRADIENT):
            assert_close(weights[name], weight, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
