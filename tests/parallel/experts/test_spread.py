"""Experts that are spread over ranks: numbers of one process, exact bytes, and the life of a model around training."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.covering import FULL_GRID, some_of
from tests.harness import run_ranks
from tests.parallel.experts import spread_jobs
from tests.parallel.experts.spread_jobs import Setting
from tests.parity.families import make_model
from tests.parity.train import relative

HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
WITH: dict[str, Any] = {"hf_dist": {"sequence_regions": True}}
WITHOUT: dict[str, Any] = {"hf_dist": {"sequence_regions": False}}
SETTINGS = [
    Setting("starved", "gpt_oss", stage=2, starved=True),
    Setting("starved-recomputed", "gpt_oss", starved=True, checkpointing=True),
    Setting("starved-at-once", "gpt_oss", starved=True, sections={"zero_optimization": {"overlap_comm": False}}),
    Setting("ranks-with-other-lengths", short=True, experts="grouped_mm"),
    Setting("frozen-experts", frozen=True, experts="grouped_mm"),
    Setting("adapters", adapters=True, experts="grouped_mm"),
    Setting("adapters-eager-replicated", "gpt_oss", stage=1, adapters=True),
    Setting("adapters-recomputed", adapters=True, checkpointing=True, accumulation=2),
    Setting("starved-adapters", "gpt_oss", adapters=True, starved=True),
    Setting("selective", sections={"activation_checkpointing": {"selective": True}}, experts="grouped_mm"),
    Setting("inputs-on-the-host", sections={"activation_checkpointing": {"cpu_checkpointing": True}}),
    Setting("offload", "gpt_oss", sections={"zero_optimization": HOST}),
    Setting("budget", accumulation=3, sections={"hf_dist": {"memory_budget": "10GB", "reduce_once_per_window": True}}),
    Setting("in-backward", stage=2, sections={"hf_dist": {"optimizer_in_backward": True}, "gradient_clipping": 0.0}),
]
WIDE = [
    *(Setting(f"pp-{schedule}-z{stage}", stage=stage, pp=2, accumulation=3, schedule=schedule, experts=experts)
      for schedule in ("1f1b", "gpipe", "zb_h1") for stage in (1, 3) for experts in ("eager", "grouped_mm")),
    *(Setting(f"pp-interleaved-z{stage}", stage=stage, pp=2, virtual=2, accumulation=2, schedule="interleaved_1f1b",
              experts=experts) for stage in (1, 3) for experts in ("eager", "grouped_mm")),
    Setting("pp-tied", stage=3, pp=2, accumulation=3, tied=True),
    Setting("tp-tied", tp=2, stage=3, tied=True),
    Setting("pp-recomputed-starved", "gpt_oss", stage=3, pp=2, accumulation=3, checkpointing=True, starved=True),
    Setting("tp-plain", tp=2, experts="grouped_mm", sections=WITHOUT),
    Setting("tp-regions-shared-experts", "deepseek_v3", tp=2, stage=1, checkpointing=True, sections=WITH),
    Setting("tp-adapters", tp=2, adapters=True, stage=2, accumulation=3),
    Setting("tp-regions", tp=2, stage=1, sections=WITH),
    Setting("tp-adapters-plain", tp=2, adapters=True, sections=WITHOUT),
    Setting("tp-starved", "gpt_oss", tp=2, stage=2, starved=True),
    Setting("tp-shared-experts-plain", "deepseek_v3", tp=2, sections=WITHOUT),
    Setting("tp-frozen", "deepseek_v3", tp=2, frozen=True),
    Setting("tp-other-lengths", tp=2, short=True),
    Setting("tp-offload", tp=2, accumulation=3, sections={"zero_optimization": HOST}),
    Setting("starved-shared", "gpt_oss", stage=3, ep=2, starved=True),
    Setting("starved-apart", "gpt_oss", stage=2, ep=4, starved=True),
    Setting("adapters-shared", ep=2, adapters=True, accumulation=3),
    Setting("deepseek-apart", "deepseek_v3", ep=4, checkpointing=True),
    Setting("hsdp-offload", ep=2, sections={"zero_optimization": {"mics_shard_size": 2, **HOST}}),
]  # fmt: skip
# Of four ranks the order that cuts a backward in two, and matrices outside of regions; `parity/test_mixed.py` has the others.
SOME = ("pp-zb_h1-z1-eager", "tp-plain-grouped_mm")
# Of two: each kind of rows, adapters, what is freed at once. What rests on the host is there, too; `test_life.py` has windows.
HERE = ("starved-recomputed", "ranks-with-other-lengths", "adapters", "in-backward")
AT = {
    2: list(some_of({setting.name: setting for setting in SETTINGS}, *HERE).values()),
    4: list(some_of({f"{setting.name}-{setting.experts}": setting for setting in WIDE}, *SOME).values()),
}
STAGES = (0, 3) if FULL_GRID else (3,)
"""Whose bytes are counted."""


@functools.cache
def trained(world: int) -> list[list[Any]] | str:
    """One spawn."""
    try:
        return run_ranks(spread_jobs.train_all, world, (AT[world],), timeout=1500 if FULL_GRID else 400)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("world", "index"), [pytest.param(w, i, id=f"{s.name}-w{w}") for w, some in AT.items() for i, s in enumerate(some)]
)
def test_equals_one_process(world: int, index: int) -> None:
    setting = AT[world][index]
    everyone = trained(world)
    assert not isinstance(everyone, str), everyone
    outcome = everyone[0][index]
    assert not isinstance(outcome, str), outcome
    expected = spread_jobs.one_process(setting)
    assert outcome["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    if setting.name != "in-backward":
        assert outcome["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    if setting.pp == 1:
        assert outcome["weights"].keys() == expected["weights"].keys()
    for name, weight in outcome["weights"].items():
        assert relative(weight, expected["weights"][name]) < 1e-5, name


@functools.cache
def rest(folder: str) -> list[Any]:
    """One spawn for what is no training."""
    return run_ranks(everything_else, 2, (folder,), timeout=300)


def everything_else(rank: int, world: int, folder: str) -> dict[str, Any]:
    """On a rank."""
    return {
        **{f"traffic {stage}": spread_jobs.traffic(rank, world, stage) for stage in STAGES},
        "loads": spread_jobs.loads_of_a_step(rank, world),
        "life": spread_jobs.lived(rank, world, folder),
        "hung": spread_jobs.hung(rank, world),
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return rest(str(tmp_path_factory.mktemp("spread")))


@pytest.mark.parametrize("stage", STAGES)
def test_tokens_take_the_bytes_that_the_routing_says_and_experts_none(stage: int, outcomes: list[Any]) -> None:
    for rank in outcomes:
        found = rank[f"traffic {stage}"]
        assert found["counted"] == found["by_hand"] > 0
        assert found["weights_of_experts_sent"] == 0
        assert found["stays"]  # in fp32 they are read where they rest, at stage 3 too
        assert found["held"] * 2 == found["whole"]
        assert 4 * found["held"] <= found["resident"] <= 4 * found["held"] * 1.05  # fp32, once; slots are aligned


@pytest.mark.parametrize("stage", STAGES)
def test_the_plan_is_the_run(stage: int, outcomes: list[Any]) -> None:
    for rank in outcomes:
        found = rank[f"traffic {stage}"]
        assert found["planned_resident"] == found["engine_resident"]
        assert found["planned_sent"] == found["sent"]


def test_rows_of_blocks_that_run_again_count_once(outcomes: list[Any]) -> None:
    for rank in outcomes:
        plain, again = rank["loads"]
        assert plain.sum() > 0
        assert torch.equal(plain, again)


def test_a_rank_that_waits_for_a_late_one_says_what_it_waits_for(outcomes: list[Any]) -> None:
    """The watchdog's words."""
    places = outcomes[0]["hung"]
    assert {waits for waits, _ in places.values()} == {"the exchange of tokens with the experts"}
    assert places["forward"][1] == "forward, model.layers.2.mlp.experts"
    assert "backward" in places["backward"][1]


def test_a_checkpoint_goes_to_any_layout_and_back(outcomes: list[Any]) -> None:
    for rank in outcomes:
        for key, value in rank["life"].items():
            if " to " in key:
                expected, found = value
                assert found == pytest.approx(expected, rel=1e-5), key
    life = outcomes[0]["life"]
    names = {name for name, _ in make_model("qwen3_moe").named_parameters()}
    for name in names:
        assert relative(life["weights of spread"][name], life["weights of plain"][name]) < 1e-5, name


def test_the_folder_of_a_checkpoint_is_a_model(outcomes: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    from transformers import AutoModelForCausalLM

    folders = {path.name: path for path in tmp_path_factory.getbasetemp().glob("spread*/*")}
    models = [AutoModelForCausalLM.from_pretrained(folders[name]) for name in ("spread", "plain")]
    for (name, a), (_, b) in zip(*(model.named_parameters() for model in models), strict=True):
        assert relative(a, b) < 1e-5, name


def test_a_model_that_has_one_ranks_experts_is_not_copied(outcomes: list[Any]) -> None:
    for rank in outcomes:
        assert "cannot be pickled or copied here" in rank["life"]["copy"]
        assert "Call hf_dist.unprepare(model) on every rank first" in rank["life"]["copy"]


def test_ranks_generate_as_one_process_does(outcomes: list[Any]) -> None:
    model = make_model("qwen3_moe").eval()
    for rank in outcomes:
        prompt, tokens = (torch.tensor(part) for part in rank["life"]["generated"])
        new = tokens.shape[1] - prompt.shape[1]
        alone = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        assert torch.equal(tokens, alone)
