"""Hugging Face's own example scripts, as they are, at ZeRO-3 on two ranks against plain DDP.

They are not part of this repository: `HF_DIST_HF_EXAMPLES` names the folder `examples/pytorch` of a checkout of transformers
(at the installed version: a script refuses an older one). Without it the tests are skipped.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem.launching import launch
from tests.ecosystem.on_ranks import collected
from tests.ecosystem.tiny import save_models, words

EXAMPLES = Path(os.environ.get("HF_DIST_HF_EXAMPLES", ""))
pytestmark = [
    pytest.mark.skipif(not os.environ.get("HF_DIST_HF_EXAMPLES"), reason="HF_DIST_HF_EXAMPLES names no checkout"),
    pytest.mark.timeout(900),
]
TRAINING = [
    *("--max_steps", "3", "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2", "--do_train"),
    *("--do_eval", "--learning_rate", "5e-3", "--adam_epsilon", "1e-3", "--logging_steps", "1", "--report_to", "none"),
    *("--save_strategy", "no", "--use_cpu", "--disable_tqdm", "True", "--seed", "5", "--max_grad_norm", "0.5"),
]
SCRIPTS: dict[str, list[str]] = {
    "language-modeling/run_clm.py": [
        *TRAINING, "--model_name_or_path", "lm", "--train_file", "text.txt", "--validation_file", "text.txt",
        "--block_size", "16", "--gradient_accumulation_steps", "2",
    ],
}  # fmt: skip
ACCURACY = """
import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": float(np.mean(np.array(predictions) == np.array(references)))}
"""
"""Stands in for the metric of that name, which `evaluate` would download."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, data and metrics."""
    import torch

    made = tmp_path_factory.mktemp("examples")
    save_models(made)
    g = torch.Generator().manual_seed(7)
    (made / "text.txt").write_text("\n".join(words(20, g) for _ in range(24)))
    (made / "zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    (made / "accuracy").mkdir()
    (made / "accuracy" / "accuracy.py").write_text(ACCURACY)
    return made


@pytest.fixture(scope="module")
def under_ddp(root: Path) -> Any:
    """`under_ddp(script)`: what the script writes without us."""

    @functools.cache
    def run(script: str) -> dict[str, Any]:
        folder = root / "ddp" / Path(script).stem
        launch("torchrun", [str(EXAMPLES / script), *SCRIPTS[script], "--output_dir", str(folder)], root)
        return collected(folder)

    return run


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_gives_the_numbers_of_ddp(script: str, launcher: str, root: Path, under_ddp: Any) -> None:
    folder = root / launcher / Path(script).stem
    given = [*SCRIPTS[script], "--output_dir", str(folder), "--deepspeed", "zero3.json"]
    launch(launcher, ["-m", "hf_dist.run", str(EXAMPLES / script), *given], root)
    plain, sharded = under_ddp(script), collected(folder)
    assert len(plain["numbers"]["loss"]) == 3
    for key, value in plain["numbers"].items():
        assert sharded["numbers"][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    assert set(plain["files"]) <= set(sharded["files"])
