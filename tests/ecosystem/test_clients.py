"""Training programs of others, as they are installed, at stages 1 and 3 on two ranks: the folders of plain DDP.

None of the packages is in the test extra: each test is skipped where its package is absent. `pip install setfit FlagEmbedding`
adds nothing else that matters; LLaMA-Factory pins older versions of most packages, and has to have an environment of its own.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ecosystem.launching import launch
from tests.ecosystem.savers import read
from tests.ecosystem.test_saving import assert_same_folder
from tests.ecosystem.tiny import save_example_models, save_models, words

pytestmark = pytest.mark.timeout(600)
RANKS_ALIKE = [
    *("--max_steps", "4", "--per_device_train_batch_size", "2", "--learning_rate", "5e-3", "--adam_epsilon", "1e-3"),
    *("--save_steps", "2", "--logging_steps", "1", "--report_to", "none", "--use_cpu", "--seed", "5"),
]
FLAG = [
    *("--train_data", "triples.jsonl", "--cache_path", "cache", "--train_group_size", "2"),
    *("--model_name_or_path", "encoder"),
]
FACTORY = [
    *("--disable_gradient_checkpointing", "true"),
    *("--model_name_or_path", "lm", "--dataset_dir", ".", "--template", "empty", "--cutoff_len", "32"),
    *("--finetuning_type", "full", "--do_train", "true", "--max_grad_norm", "0.5", "--overwrite_cache", "true"),
]
REWARD = [
    *("--stage", "rm", "--dataset", "choices", "--eval_dataset", "choices", "--eval_strategy", "steps"),
    *("--eval_steps", "2"),
    *("--per_device_eval_batch_size", "3"),  # 16 rows do not divide
]
SETFIT = """
import os
import sys
from datasets import Dataset
from setfit import SetFitModel, Trainer, TrainingArguments

folder = sys.argv[sys.argv.index("--output_dir") + 1]
rows = [f"w{3 + i} w{9 + i % 5} w{20 + i % 7}" for i in range(16)]
data = Dataset.from_dict({"text": rows, "label": [i % 2 for i in range(16)]})
model = SetFitModel.from_pretrained("encoder", device="cpu")
args = TrainingArguments(folder, batch_size=2, max_steps=4, save_strategy="steps", save_steps=2, report_to="none", seed=5,
                         body_learning_rate=5e-3, load_best_model_at_end=False)
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train()
# Every rank calls it, into a folder of its own: two that write one file lose keys of it, stock ones too.
trainer.model.save_pretrained(folder + ("/final" if os.environ["RANK"] == "0" else "/other"))
"""


@dataclass(frozen=True)
class Client:
    """One program: the package that it needs, its words, and the folders that it writes."""

    package: str
    words: list[str]
    folders: tuple[str, ...] = ("checkpoint-4",)
    fault: str = ""
    """Words of an error that plain DDP ends with in some versions: then there is nothing to compare with."""


CLIENTS: dict[str, Client] = {
    "setfit": Client("setfit", ["fit.py"], ("checkpoint-4", "final")),
    "embedder": Client(
        "FlagEmbedding",
        ["-m", "FlagEmbedding.finetune.embedder.encoder_only.base", *RANKS_ALIKE, *FLAG, "--query_max_len", "16"],
    ),
    "embedder, one contrast": Client(
        "FlagEmbedding",
        ["-m", "FlagEmbedding.finetune.embedder.encoder_only.base", *RANKS_ALIKE, *FLAG, "--negatives_cross_device"],
    ),
    "reranker": Client(
        "FlagEmbedding", ["-m", "FlagEmbedding.finetune.reranker.encoder_only.base", *RANKS_ALIKE, *FLAG]
    ),
    "factory, sft": Client(
        "llamafactory", ["factory.py", *RANKS_ALIKE, *FACTORY, "--stage", "sft", "--dataset", "turns"]
    ),
    "factory, dpo": Client(
        "llamafactory", ["factory.py", *RANKS_ALIKE, *FACTORY, "--stage", "dpo", "--dataset", "choices"]
    ),
    "factory, rm": Client("llamafactory", ["factory.py", *RANKS_ALIKE, *FACTORY, *REWARD], fault="share memory"),
    "factory, rm, lora": Client(
        "llamafactory", ["factory.py", *RANKS_ALIKE, *FACTORY, *REWARD, "--finetuning_type", "lora", "--lora_rank", "4"]
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, Any]]:
    """`written(client, stage)`: what is in the folders of a run under torchrun; stage 0: plain DDP."""
    root = tmp_path_factory.mktemp("clients")
    save_models(root)
    save_example_models(root)
    save_data(root)

    @functools.cache
    def run(name: str, stage: int) -> dict[str, Any]:
        client, folder = CLIENTS[name], f"out/{name.replace(', ', '_')}_{stage}"
        given = [*client.words, "--output_dir", folder]
        if stage:
            given = ["-m", "hf_dist.run", "--config", f"zero{stage}.json", *given]
        launch("torchrun", given, root)
        return {part: parsed(root / folder / part) for part in client.folders}

    return run


def parsed(folder: Path) -> dict[str, Any]:
    """What is in a folder. SetFit writes the keys of its configuration in the order of a set, and a head of scikit-learn."""
    found = read(folder)
    texts = {name: json.loads(value) for name, value in found.items() if name.endswith(".json")}
    for adapter in (text for text in texts.values() if isinstance(text, dict) and "target_modules" in text):
        adapter["target_modules"] = sorted(adapter["target_modules"])  # LLaMA-Factory's are a set
    heads = {name: fitted(folder / name) for name in found if name.endswith(".pkl")}
    return {**found, **texts, **heads}


def fitted(head: Path) -> dict[str, torch.Tensor]:
    """What scikit-learn has fitted on embeddings whose last bits differ."""
    import joblib  # comes with SetFit

    arrays = {name: value for name, value in vars(joblib.load(head)).items() if isinstance(value, np.ndarray)}
    assert arrays
    return {name: torch.as_tensor(value) for name, value in arrays.items()}


def save_data(root: Path) -> None:
    """Rows of every program, and its configuration."""
    g = torch.Generator().manual_seed(8)
    text = [words(6, g) for _ in range(64)]
    triples = [
        {"query": a, "pos": [b], "neg": [c]} for a, b, c in zip(text[:16], text[16:32], text[32:48], strict=True)
    ]
    (root / "triples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in triples))
    turns = [{"instruction": row["query"], "input": "", "output": row["pos"][0]} for row in triples]
    choices = [{**row, "chosen": row["output"], "rejected": text[48 + i]} for i, row in enumerate(turns)]
    (root / "turns.json").write_text(json.dumps(turns))
    (root / "choices.json").write_text(json.dumps(choices))
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    told = {"turns": {"file_name": "turns.json"}}
    told["choices"] = {"file_name": "choices.json", "ranking": True, "columns": columns}  # type: ignore[dict-item]
    (root / "dataset_info.json").write_text(json.dumps(told))
    (root / "fit.py").write_text(SETFIT)
    (root / "factory.py").write_text("from llamafactory.train.tuner import run_exp\n\nrun_exp()\n")
    for stage in (1, 3):
        (root / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", CLIENTS)
def test_the_folders_are_those_of_ddp(name: str, stage: int, written: Any) -> None:
    client = CLIENTS[name]
    if importlib.util.find_spec(client.package) is None:
        pytest.skip(f"{client.package} is not installed")
    try:
        stock = copy.deepcopy(written(name, 0))
    except AssertionError as error:
        if client.fault and client.fault in str(error):
            pytest.skip(f"plain DDP fails with these versions: {client.fault}")
        raise
    ours = copy.deepcopy(written(name, stage))
    for folder in client.folders:
        assert any(file.endswith(".safetensors") for file in stock[folder])
        texts = [name for name in stock[folder] if name.endswith(".json")]
        assert {name: ours[folder].pop(name) for name in texts} == {name: stock[folder][name] for name in texts}
        weights = {name: value for name, value in stock[folder].items() if name not in texts}
        assert_same_folder(ours[folder], weights)
