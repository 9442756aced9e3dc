"""PEFT's adapters, sharded: equal to one process at every stage; saved, merged, switched, loaded; or refused by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from hf_dist.errors import ModelError
from hf_dist.sharding.quantised import prepare_quantised
from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs
from tests.hf.peft_jobs import base_model, rows

JOBS = "tests.hf.peft_jobs:"
TOLERANCE = 1e-5
FOUR_BITS = importlib.util.find_spec("bitsandbytes") is not None
CASES = [
    *((kind, stage, False) for kind in ("lora", "dora", "modules_to_save", "several") for stage in (1, 2, 3)),
    *((kind, stage, False) for kind in ("half_base", "tied") for stage in (1, 3)),
    *((kind, 3, False) for kind in ("tied_views", "embedding", "score", "ia3", "loha")),
    *((kind, 3, True) for kind in ("lora", "dora", "modules_to_save", "several", "half_base")),
    *(("quantised", stage, stage == 2) for stage in (1, 2, 3) if FOUR_BITS),
]
FEW = [
    *(("lora", 1, False), ("dora", 3, True), ("modules_to_save", 3, False), ("half_base", 1, False)),
    *(("embedding", 3, False), ("quantised", 3, False)),
]
"""`embedding`: the root has frozen and trained weights. `modules_to_save` switches as `several` does; ties: `sharding/`."""
CASES = CASES if FULL_GRID else [case for case in CASES if case in FEW]
Job = tuple[str, dict[str, Any]]


def job_of(kind: str, stage: int | None, checkpointing: bool) -> Job:
    """A training."""
    return JOBS + "train", {"kind": kind, "stage": stage, "checkpointing": checkpointing}


HALF = [(JOBS + "half_merged", {"kind": kind}) for kind in (("lora", "dora") if FULL_GRID else ("dora",))]
LOADED = [(JOBS + "loaded", {"stage": stage}) for stage in ((1, 3) if FULL_GRID else (3,))]
CONVERTED = [(JOBS + "converted", {"init": init, "stage": stage}) for init, stage in (("pissa", 3), ("olora", 1))]
CONVERTED = CONVERTED if FULL_GRID else CONVERTED[:1]
ON_RANKS: list[Job] = [*(job_of(*case) for case in CASES), *HALF, *LOADED, *CONVERTED, (JOBS + "errors", {})]
ALONE: list[Job] = [
    *(job_of(kind, None, False) for kind in {case[0]: 0 for case in CASES}),
    (LOADED[0][0], {"stage": 0}),
    *((name, {**job, "stage": None}) for name, job in CONVERTED),
]
Outcomes = Callable[..., Any]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """`outcomes(job)` of the main rank of two, `outcomes(job, alone=True)` of one process."""
    found = {}
    for world, jobs in ((2, ON_RANKS), (1, ALONE)):
        results = run_ranks(run_jobs, world, (jobs, str(tmp_path_factory.mktemp("ranks"))))
        found[world] = [(job, [rank[i] for rank in results]) for i, job in enumerate(jobs)]

    def of(job: Job, alone: bool = False, rank: int = 0) -> Any:
        every = next(result for known, result in found[1 if alone else 2] if known == job)
        assert not isinstance(every[rank], str), every[rank]
        return every[rank]

    return of


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Every tensor by itself, relative to its norm."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        difference = float((found[name].double() - value.double()).norm())
        assert difference <= tolerance * float(value.double().norm()) + 1e-12, name


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-z{c[1]}{'-checkpointing' * c[2]}")
def test_adapters_train_as_in_one_process(case: tuple[str, int, bool], outcomes: Outcomes) -> None:
    found, expected = outcomes(job_of(*case)), outcomes(job_of(case[0], None, False), alone=True)
    assert min(expected["norms"]) > 0 and len(set(expected["losses"])) == len(expected["losses"])
    # A base in bf16 has nothing finer than its own digits where its rounded activations are summed in another order.
    tolerance = 2e-2 if case[0] == "half_base" else TOLERANCE
    for key in ("losses", "norms", "adapted", "disabled", *(k for k in ("unmerged", "merged") if k in expected)):
        assert found[key] == pytest.approx(expected[key], rel=tolerance), key
    packed = {n for n in expected["weights"] if case[0] == "quantised" and "lora" not in n}
    pick = lambda weights: {n: v for n, v in weights.items() if n not in packed}  # noqa: E731
    check_equal(pick(found["weights"]), pick(expected["weights"]), tolerance)


@pytest.mark.parametrize("case", [c for c in CASES if not c[2]], ids=lambda c: f"{c[0]}-z{c[1]}")
def test_the_saved_adapter_and_the_merged_model_load_with_the_stock_libraries(
    case: tuple[str, int, bool], outcomes: Outcomes
) -> None:
    from peft import PeftModel

    found, expected = outcomes(job_of(*case)), outcomes(job_of(case[0], None, False), alone=True)
    mine, theirs = Path(found["folder"]), Path(expected["folder"])
    tolerance = 2e-2 if case[0] == "half_base" else TOLERANCE
    written = sorted(p.relative_to(theirs) for p in theirs.rglob("*.safetensors"))
    assert written and written == sorted(p.relative_to(mine) for p in mine.rglob("*.safetensors"))
    for name in written:
        check_equal(load_file(mine / name), load_file(theirs / name), tolerance)
    if case[0] not in ("lora", "dora", "modules_to_save"):
        return
    # `several` and `modules_to_save` end with their second adapter.
    adapter = mine / "adapter" / ("second" if case[0] == "modules_to_save" else ".")
    loaded = PeftModel.from_pretrained(base_model(), adapter).eval()
    whole = tf.LlamaForCausalLM.from_pretrained(mine / "merged").eval()
    with torch.no_grad():
        assert float(loaded(**rows(0, 1, False)).loss) == pytest.approx(found["adapted"], rel=TOLERANCE)
        assert float(whole(**rows(0, 1, False)).loss) == pytest.approx(found["merged"], rel=TOLERANCE)


@pytest.mark.parametrize("job", HALF, ids=lambda j: str(j[1]["kind"]))
def test_a_merge_in_half_precision_uses_the_masters(job: Job, outcomes: Outcomes) -> None:
    from peft import PeftModel

    folder = Path(outcomes(job)["folder"])
    base = base_model().to(torch.bfloat16).float()  # frozen weights rest in the compute dtype
    before = {name: value.clone() for name, value in base.state_dict().items()}
    expected = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload()
    for name, value in load_file(folder / "merged" / "model.safetensors").items():
        theirs = expected.state_dict()[name]
        # Merged, unmerged and merged again, each sum rounded to bf16, and what is added as well: half a step of each.
        added = theirs - before[name]
        limit = 2**-8 * (2 * theirs.abs() + before[name].abs() + added.abs()) + 1e-8
        assert bool(((value - theirs).abs() <= limit).all()), name


@pytest.mark.parametrize("job", LOADED, ids=lambda j: f"z{j[1]['stage']}")
def test_weights_loaded_into_an_adapter_reach_the_shards(job: Job, outcomes: Outcomes) -> None:
    expected = outcomes((LOADED[0][0], {"stage": 0}), alone=True)
    assert expected[0] != expected[1] != expected[2]
    assert outcomes(job) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("what", ["add", "load", "weigh", "delete"])
def test_adapters_added_or_removed_after_prepare_are_refused_by_name(what: str, outcomes: Outcomes) -> None:
    for rank in (0, 1):
        errors = outcomes((JOBS + "errors", {}), rank=rank)
        assert errors[what].startswith("ModelError: ") and "['default', 'second" in errors[what], errors[what]
        assert "Add every adapter before the model is prepared" in errors[what]
        assert 1 < float(errors["loss"]) < 10


def test_prompt_learning_is_refused_by_name(outcomes: Outcomes) -> None:
    assert "adapter 'default' is PROMPT_TUNING" in outcomes((JOBS + "errors", {}))["prompt"]


@pytest.mark.skipif(not FOUR_BITS, reason="bitsandbytes is not installed")
def test_the_bytes_of_a_four_bit_base_are_spread_over_the_ranks(outcomes: Outcomes) -> None:
    for stage, part in ((1, 1), (3, 2)) if FULL_GRID else ((3, 2),):
        held, whole = outcomes(job_of("quantised", stage, False))["numel"]
        assert whole > 0 and held == pytest.approx(whole / part, rel=0.05)  # padding


class Int8Params(nn.Parameter):
    """Stands for the class of bitsandbytes."""


class Params4bit(nn.Parameter):
    """Stands for the class of bitsandbytes, before it was quantised."""


def packed(requires_grad: bool = False) -> nn.Parameter:
    """A 4-bit weight as bitsandbytes leaves it on its device."""
    weight = Params4bit(torch.zeros(8, 1), requires_grad=requires_grad)
    weight.quant_state = object()
    return weight


def made_of_two(module: str) -> nn.Parameter:
    """A tensor subclass that wraps others, of another library."""
    wrapper = type("Int8Tensor", (TwoTensor,), {"__module__": module})
    return nn.Parameter(wrapper(torch.zeros(4, 4), torch.zeros(4, 4)))


REMEDIES = {
    "int8": (lambda: Int8Params(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False), "8-bit weight of bitsandbytes",
             "QLoRA"),
    "unpacked": (lambda: Params4bit(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False), "not quantised yet",
                 "Move the model"),
    "trained": (lambda: packed(requires_grad=True), "4-bit weight that requires a gradient", "Freeze it"),
    "float8": (lambda: nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False), "torch.float8_e4m3fn",
               "FineGrainedFP8Config"),
    "torchao": (lambda: made_of_two("torchao.quantization"), "an? Int8Tensor of torchao", "quantise the saved one"),
    "unknown": (lambda: made_of_two("somebody.tensors"), "an? Int8Tensor of somebody", "before somebody wraps"),
}  # fmt: skip
"""A weight that no shard can hold: what it is, and words of the remedy for that cause alone."""


@pytest.mark.parametrize("kind", REMEDIES)
def test_weights_that_no_shard_can_hold_are_refused_as_what_they_are(kind: str) -> None:
    weight, says, remedy = REMEDIES[kind]
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = weight()
    with pytest.raises(ModelError, match=f"0.weight is .*{says}.*{remedy}") as caught:
        prepare_quantised(model)
    others = {words for name, (_, _, words) in REMEDIES.items() if name not in (kind, "int8")}
    assert not [words for words in others if words in str(caught.value)]


@pytest.mark.parametrize("job", CONVERTED, ids=lambda job: job[1]["init"])
def test_an_adapter_that_changes_its_base_is_saved_as_lora_of_the_base_as_it_was(job: Job, outcomes: Outcomes) -> None:
    here, alone = outcomes(job), outcomes((job[0], {**job[1], "stage": None}), alone=True)
    assert here["loss"] == pytest.approx(alone["loss"], rel=TOLERANCE)
    assert here["reloaded"] == pytest.approx(here["loss"], rel=1e-4), "the file and the trained model compute the same"
    assert here["reloaded"] == pytest.approx(alone["reloaded"], rel=TOLERANCE)
    assert here["adapters"] == outcomes(job, rank=1)["adapters"] == ["default"]
    assert here["rank"] == 8, "twice that of the adapter"
