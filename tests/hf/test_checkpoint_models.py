"""`checkpoint-N` and `save_model()` are what `from_pretrained` expects, for every kind of model, ZeRO stage and way to save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors import safe_open

from tests.covering import FULL_GRID, FULL_GRID_ONLY, cells
from tests.harness import run_ranks
from tests.hf import checkpoint_models as kinds
from tests.hf.on_ranks import run_jobs

JOB = "tests.hf.checkpoint_models:"
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
STAGES = (0, 1, 2, 3)
GRID = [
    *((kind, stage, None) for kind in kinds.KINDS for stage in STAGES),
    *((kind, stage, BF16) for kind, stage in (("tied", 3), ("moe", 2), ("lora_modules", 3), ("bert", 1))),
]
if not FULL_GRID:  # tied weights: `BEST`; other models and adapters: `checkpoint/test_weight_write.py`
    GRID = [("moe", 3, None), ("lora_modules", 3, BF16), ("bert", 1, BF16)]
WAYS = ((False, False), (False, True), (True, False), (True, True))
"""In the background, the model only."""
BEST = [(cell["stage"], *cell["way"]) for cell in cells({"stage": STAGES, "way": WAYS})]
BEST = BEST if FULL_GRID else [(0, False, True), (3, True, False)]
LIMITED = (False, True) if FULL_GRID else ()  # half of `BEST` are limited while they are written
CLEANED = (None, 1) if FULL_GRID else (1,)
OVERRIDDEN = (0, 3) if FULL_GRID else (3,)
JOBS = [
    *((JOB + "trained", {"kind": kind, "stage": stage, "config": config}) for kind, stage, config in GRID),
    *(
        (JOB + "best_kept", {"stage": s, "async_save": b, "only_model": o, "limit": 1 if s > 1 else 2})
        for s, b, o in BEST
    ),
    *((JOB + "limited", {"async_save": background, "limit": 2}) for background in LIMITED),
    *((JOB + "cleaned", {"limit": limit}) for limit in CLEANED),
    *((JOB + "overridden", {"stage": stage, "async_save": stage > 1}) for stage in OVERRIDDEN),
    (JOB + "background_failure", {}),
    (JOB + "no_room", {"stage": 3}),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`outcomes(function, arguments)`: what each rank returned; one spawn for all."""
    results = run_ranks(run_jobs, 2, (JOBS, str(tmp_path_factory.mktemp("ranks"))), timeout=1500)

    def of(name: str, **arguments: Any) -> list[Any]:
        index = JOBS.index((JOB + name, arguments))
        for rank in results:
            assert not (isinstance(rank[index], str) and "Traceback" in rank[index]), rank[index]
        return [rank[index] for rank in results]

    return of


@pytest.mark.parametrize("limit", CLEANED)
def test_a_training_whose_best_checkpoint_is_gone_ends_with_its_last_weights(limit: int | None, outcomes: Any) -> None:
    first, second = outcomes("cleaned", limit=limit)
    assert first["steps"] == second["steps"] == 3
    saved, last = (files_of(Path(first["folder"], name)) for name in ("saved", "checkpoint-3"))
    assert saved.keys() == last.keys() and all(torch.equal(saved[name], last[name]) for name in saved)


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the weight files."""
    found = {}
    for path in folder.glob("*model*.safetensors"):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


@pytest.mark.parametrize(
    ("kind", "stage", "config"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}{'-bf16' if case[2] else ''}") for case in GRID],
)
def test_a_plain_process_loads_the_checkpoint_and_gets_the_same_logits(
    kind: str, stage: int, config: Any, outcomes: Any
) -> None:
    outcome = outcomes("trained", kind=kind, stage=stage, config=config)[0]
    folder = Path(outcome["folder"], "checkpoint-2")
    model = kinds.load(kind, str(folder))
    state = model.state_dict()
    assert state.keys() == outcome["weights"].keys()
    for name, weight in outcome["weights"].items():
        loaded = state[name]
        if config is not None and kind in kinds.ADAPTERS and "lora" not in name and "modules_to_save" not in name:
            loaded = loaded.to(torch.bfloat16)  # a frozen weight is held in the compute dtype alone
        assert torch.equal(loaded.float(), weight.float()), name
    with torch.no_grad():
        if config is None:
            torch.testing.assert_close(model(input_ids=kinds.example()).logits, outcome["logits"], rtol=1e-5, atol=1e-6)
        else:  # the live model computes in bf16
            logits = model.to(torch.bfloat16)(input_ids=kinds.example()).logits
            torch.testing.assert_close(logits, outcome["logits"], rtol=0.02, atol=0.02)
    tensors = files_of(folder)
    assert tensors and all(t.numel() for t in tensors.values())
    again = files_of(Path(outcome["folder"], "saved"))
    assert tensors.keys() == again.keys() and all(torch.equal(t, again[n]) for n, t in tensors.items())
    check_small_files(kind, folder, Path(outcome["folder"], "saved"))


def check_small_files(kind: str, checkpoint: Path, saved: Path) -> None:
    """Configuration, tokenizer, generation settings."""
    adapter = kind in kinds.ADAPTERS
    for folder in (checkpoint, saved):
        names = {path.name for path in folder.iterdir()}
        assert {"tokenizer.json", "tokenizer_config.json", "training_args.bin"} <= names
        assert tf.AutoTokenizer.from_pretrained(folder).pad_token == "w0"
        assert ("adapter_config.json" in names, "config.json" in names) == (adapter, not adapter)
        assert ("generation_config.json" in names) is (kind in ("tied", "untied", "moe"))
        if not adapter:
            assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert "trainer_state.json" in {path.name for path in checkpoint.iterdir()}


@pytest.mark.parametrize(("stage", "background", "only"), BEST)
def test_the_best_model_is_kept_and_loaded_whatever_is_saved(
    stage: int, background: bool, only: bool, outcomes: Any
) -> None:
    limit = 1 if stage > 1 else 2
    for outcome in outcomes("best_kept", stage=stage, async_save=background, only_model=only, limit=limit):
        assert Path(outcome["best"]).name == "checkpoint-1"
        left = [name for name in outcome["checkpoints"] if name.startswith("checkpoint-")]
        assert left == (["checkpoint-1"] if limit == 1 else ["checkpoint-1", "checkpoint-3"])
        assert not [name for name in outcome["checkpoints"] if name.startswith(".")]
    outcome = outcomes("best_kept", stage=stage, async_save=background, only_model=only, limit=limit)[0]
    for folder in (outcome["best"], str(Path(outcome["folder"], "saved"))):
        state = kinds.load("tied", folder).state_dict()
        assert [n for n, w in outcome["weights"].items() if not torch.equal(state[n], w)] == [], folder


@FULL_GRID_ONLY
@pytest.mark.parametrize("background", (False, True))
def test_the_limit_holds_at_the_end_of_train(background: bool, outcomes: Any) -> None:
    for left in outcomes("limited", async_save=background, limit=2):
        assert left == ["checkpoint-2", "checkpoint-3", "latest"]


@pytest.mark.parametrize("stage", OVERRIDDEN)
def test_overrides_of_a_users_trainer_take_part_in_every_save(stage: int, outcomes: Any) -> None:
    for outcome in outcomes("overridden", stage=stage, async_save=stage > 1):
        files = {"config.json", "model.safetensors", "note.txt", "projector.safetensors"}
        assert files | {"hf_dist.json", "trainer_state.json"} <= set(outcome["checkpoint"])
        assert files <= set(outcome["top"])
        assert outcome["note"] == "2" and outcome["saved"] == [1, 2]
        assert outcome["pushed"] == [], "push_to_hub was not asked for"


def test_a_failed_write_in_the_background_ends_training_at_the_next_step(outcomes: Any) -> None:
    for outcome in outcomes("background_failure"):
        assert outcome["error"] is not None and outcome["error"].startswith("CheckpointError"), outcome
        assert "checkpoint-4 could not be written" in outcome["error"]
        assert outcome["step"] == 4, "the step after the save never ended"


def test_a_disk_that_is_too_small_is_said_before_the_first_step(outcomes: Any) -> None:
    first, second = outcomes("no_room", stage=3)
    assert first == second and first.startswith("0 CheckpointError: checkpoints will not fit: each takes")
    assert "save_total_limit=2 keeps 2 and writes one more" in first and "100 kB are free" in first
