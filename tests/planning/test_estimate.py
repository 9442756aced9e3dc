"""The memory plan: bytes at rest equal the engine's, activations equal what autograd saves, advice and its messages."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_dist.config import axes_of, load_config, resolve_without_trainer
from hf_dist.memory.offload.resting import Tier
from hf_dist.parallel.sequence.ring_plan import masked_nbytes
from hf_dist.planning import overhead
from hf_dist.planning.memory_plan import Limits
from hf_dist.planning.planner import Planner, Workload
from hf_dist.planning.recorder import measure_activations, text_batch
from hf_dist.planning.state_bytes import States
from hf_dist.planning.temporary import Temporary
from hf_dist.tools.cli import app
from tests.covering import FULL_GRID, FULL_GRID_ONLY, chosen
from tests.harness import run_ranks
from tests.parity.families import make_model

MICRO, SEQ, VOCAB = 2, 64, 128
CASES = {
    f"stage{stage}-{kind or 'none'}-{optimizer}": (stage, kind, optimizer)
    for stage in (0, 1, 2, 3)
    for kind in ("", *(("cpu",) if stage else ()), *(("cpu+cpu",) if stage == 3 else ()))
    for optimizer in (
        "AdamW",
        "SGD",
        "Muon",
        "AdamW all in bf16",
        *(() if kind else ("Lamb", "Adafactor", "AdamW in bf16")),
    )
}


def states_of(case: str) -> dict[str, Any]:
    """Every place of states at every stage, and every optimizer."""
    stage, kind, optimizer = CASES[case]
    return {"rest": (stage, kind), "optimizer": optimizer}


CASES = {case: CASES[case] for case in chosen(list(CASES), states_of, 1)}


def llama(layers: int = 3) -> LlamaForCausalLM:
    """A small model with an odd vocabulary, so that padding counts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB + 3,
        hidden_size=64,
        intermediate_size=100,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaForCausalLM(config)


def config_of(stage: int, kind: str, optimizer: str = "AdamW", **more: Any) -> dict[str, Any]:
    """A config whose `kind` is "", "cpu" (optimizer) or "cpu+cpu" (weights as well)."""
    offload = dict(zip(("offload_optimizer", "offload_param"), kind.split("+") if kind else (), strict=False))
    own: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Adafactor": {"relative_step": False, "beta1": 0.9}}
    own["AdamW in bf16"] = {"fp32_optimizer_states": False}
    own["AdamW all in bf16"] = own["AdamW in bf16"]
    params = {"lr": 1e-3, **own.get(optimizer, {})}
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": optimizer.partition(" ")[0], "params": params},
        "zero_optimization": {"stage": stage, **{key: {"device": device} for key, device in offload.items()}},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": "all" in optimizer},
        **more,
    }


def resolved(data: dict[str, Any]) -> Any:
    """As a loop of one's own resolves it."""
    return resolve_without_trainer(load_config(data), hidden_size=64)


def rest_of_ranks(rank: int, world: int) -> dict[str, Any]:
    """By case: bytes the engine holds after a step, device gradients at the boundary, and the plan of a meta model."""
    import hf_dist

    found = {}
    for name, (stage, kind, optimizer) in CASES.items():
        data = config_of(stage, kind, optimizer)
        engine = hf_dist.initialize(llama(), config=data, device="cpu")
        ids = torch.arange(MICRO * SEQ).view(MICRO, SEQ) % VOCAB
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.sharded.finish_gradients()
        grads = [g.grad for g in engine.sharded.trainable_groups if g.grad is not None and not kind]
        held = sum(g.numel() * g.element_size() for g in grads)
        engine.step()
        with torch.device("meta"):
            meta = llama()
        planned = States.of_model(meta, resolved(data), num_shards=world, rank=rank)
        same = States.of_engine(engine.sharded, engine.config, planned.optimizer)
        rows = [
            ({**{t.value: s.nbytes.resident(t) for t in Tier}, "gradients": s.nbytes.gradients[Tier.DEVICE]})
            for s in (planned, same)
        ]
        found[name] = ({**engine.resident_nbytes(), "gradients": held}, *rows)
    return found


@pytest.fixture(scope="module", params=(1, 2) if FULL_GRID else (2,), ids=lambda n: f"{n}-ranks")
def at_rest(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What every rank found."""
    return run_ranks(rest_of_ranks, request.param)


@pytest.mark.parametrize("case", CASES)
def test_bytes_at_rest_equal_the_plan(case: str, at_rest: list[dict[str, Any]]) -> None:
    for of_rank in at_rest:
        held, planned, of_engine = of_rank[case]
        assert planned == held
        assert of_engine == held


def saved_nbytes(model: Any, weights: Any, **batch: Any) -> int:
    """Bytes that autograd saves in a forward without labels; weights, buffers and arguments do not count."""
    # The storage object, not its address: freed weights have none.
    seen = {t.untyped_storage()._cdata for t in (*weights, *model.buffers(), *batch.values())}
    alive, total = [], 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        alive.append(tensor)
        if tensor.untyped_storage()._cdata not in seen:
            seen.add(tensor.untyped_storage()._cdata)
            total += tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        model.train()(**batch)
    return total


@pytest.mark.parametrize("every", [0, 1, 2], ids=["kept", "checkpointed", "every_second"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_activations_equal_what_autograd_saves(dtype: str, every: int) -> None:
    import hf_dist

    more: dict[str, Any] = {"bf16": {"enabled": dtype == "bf16"}}
    if every:
        more["activation_checkpointing"] = {"every_n_layers": every}
    data = config_of(3, "", **more)
    engine = hf_dist.initialize(llama(4), config=data, device="cpu")
    ids = torch.zeros(MICRO, SEQ, dtype=torch.long)
    measured = saved_nbytes(engine.model, [group.full.values for group in engine.sharded.groups], input_ids=ids)
    with torch.device("meta"):
        meta = llama(4)
    config = resolved(data)
    planned = measure_activations(meta, config, text_batch(meta, MICRO, SEQ)).kept(config)
    # Norms and inputs in fp32 are the tensors themselves; the rest is the same storages.
    assert planned.device == pytest.approx(measured, rel=0.1)
    assert (planned.recomputed > 0) == bool(every)


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "bert", "t5", "qwen3_moe"])
def test_activations_of_other_families(family: str) -> None:
    model = make_model(family).to(torch.bfloat16)
    config = resolved(config_of(1, ""))
    batch = text_batch(model, 2, 16)
    planned = measure_activations(model, config, batch).kept(config)
    real = {name: torch.zeros(v.shape, dtype=v.dtype) for name, v in batch.items() if isinstance(v, torch.Tensor)}
    assert planned.device == pytest.approx(saved_nbytes(model, model.parameters(), **real), rel=0.1)


def test_a_model_that_takes_no_text_has_a_plan_of_its_states() -> None:
    plan = Planner(make_model("vit"), 2, Workload(2, 16)).plan(resolved(config_of(1, "")))
    assert plan.problem
    assert plan.activations == 0
    assert plan.states.nbytes.optimizer[Tier.DEVICE] > 0


def test_inputs_of_blocks_move_to_the_host_and_selective_keeps_more() -> None:
    with torch.device("meta"):
        meta = llama(4)
    found = {}
    for key in ("every_n_layers", "cpu_checkpointing", "selective"):
        value = {key: 1 if key == "every_n_layers" else True}
        config = resolved(config_of(3, "", activation_checkpointing=value))
        found[key] = measure_activations(meta, config, text_batch(meta, MICRO, SEQ)).kept(config)
    hidden = MICRO * SEQ * 64 * 2
    assert found["cpu_checkpointing"].host == 4 * hidden
    assert found["every_n_layers"].device - found["cpu_checkpointing"].device == 2 * hidden  # the latest two stay
    assert found["selective"].device > found["every_n_layers"].device
    assert found["selective"].recomputed < found["every_n_layers"].recomputed


def test_a_pipeline_splits_states_and_activations() -> None:
    with torch.device("meta"):
        meta = llama(4)
    planner = Planner(meta, 2, Workload(MICRO, SEQ))
    whole = planner.plan(resolved(config_of(1, "")))
    cut = planner.plan(
        resolved(config_of(1, "", pipeline={"stages": 2}, gradient_accumulation_steps=4, train_batch_size=8))
    )
    assert 0 < cut.states.nbytes.weights[Tier.DEVICE] < whole.states.nbytes.weights[Tier.DEVICE]
    assert cut.in_flight in (1, 2)


def test_a_ring_counts_the_masked_tile_of_packed_rows() -> None:
    model, found = llama(), {}
    for exchange in ("gather", "ring", [2, 2]):
        more = {"sequence_parallel_size": 4, "hf_dist": {"sequence_parallel": exchange}}
        planner = Planner(model, 4, Workload(seq=8192, micro=2))
        found[str(exchange)] = planner.plan(resolved(config_of(3, "", **more))).passing
    config = model.config
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    assert found["ring"] - found["gather"] == masked_nbytes(2, heads, 1024, width)
    assert found["[2, 2]"] - found["gather"] == masked_nbytes(2, heads // 2, 2048, width)


def plan_command(folder: Path, *arguments: str, data: dict[str, Any] | None = None) -> Any:
    """Run `hf-dist plan` on the small model."""
    llama(2).config.save_pretrained(folder / "model")
    config = folder / "ds.json"
    config.write_text(json.dumps(data or {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}))
    options = ["--model", str(folder / "model"), "--config", str(config), "--seq", "512", "--micro-batch", "4"]
    return CliRunner().invoke(app, ["plan", *options, *arguments])


def test_the_command_says_that_it_fits(tmp_path: Path) -> None:
    result = plan_command(tmp_path, "--world-size", "2", "--device-memory", "3GB", "--host-memory", "1GiB/2")
    assert result.exit_code == 0, result.output
    for words in (
        "optimizer state",
        "activations",
        "logits and loss",
        "one checkpoint",
        "of 3 GB: fits",
        "CUDA's context, cuBLAS, NCCL",
        "device, needed",
        "would save more",
    ):
        assert words in result.output
    assert "gradient checkpointing: saves" in result.output
    open_question = plan_command(tmp_path, "--world-size", "2").output
    assert "verdict\n  device: not known; --device-memory 80GB says" in open_question and "one setting" in open_question


@FULL_GRID_ONLY  # those that share rows are suggested by the same code
def test_the_command_suggests_configs_that_load_and_fit(tmp_path: Path) -> None:
    full = json.loads(plan_command(tmp_path, "--world-size", "2", "--json").output)
    limit = int(full["device_peak"] * 0.7) + full["device_beside"]
    out = tmp_path / "fitting"
    result = plan_command(tmp_path, "--world-size", "2", "--device-memory", str(limit), "--suggest", str(out))
    assert result.exit_code == 0, result.output
    assert "does not fit" in result.output
    files = sorted(out.glob("*.json"))
    assert files
    for file in files if FULL_GRID else files[-1:]:
        again = plan_command(
            tmp_path, "--world-size", "2", "--device-memory", str(limit), "--json", data=json.loads(file.read_text())
        )
        data = json.loads(file.read_text())
        micro = data.get("train_micro_batch_size_per_gpu")
        if micro is None:  # else --micro-batch of the helper above would say otherwise
            assert json.loads(again.output)["fits"], file.read_text()


def test_the_command_suggests_to_share_long_rows(tmp_path: Path) -> None:
    asked = ("--world-size", "4", "--seq", "1M", "--micro-batch", "1", "--json")
    own = {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "activation_checkpointing": {"every_n_layers": 1},
    }
    now = json.loads(plan_command(tmp_path, *asked, data=own).output)
    limit = now["device_beside"] + int(now["device_peak"] * 0.75)  # more communicators need room, too
    out = tmp_path / "long"
    found = json.loads(
        plan_command(tmp_path, *asked, "--device-memory", f"{limit}B", "--suggest", str(out), data=own).output
    )
    assert not found["fits"] and found["suggestions"]
    for file in found["suggestions"] if FULL_GRID else found["suggestions"][-1:]:
        data = json.loads(Path(file).read_text())
        if "sequence_parallel_size" in data:
            assert data["gradient_accumulation_steps"] == data["sequence_parallel_size"]  # as many samples per step
        again = json.loads(plan_command(tmp_path, *asked, "--device-memory", f"{limit}B", data=data).output)
        assert again["fits"], data
    assert any(json.loads(Path(file).read_text()).get("sequence_parallel_size", 1) > 1 for file in found["suggestions"])


@pytest.mark.parametrize(
    ("world", "more", "groups", "channels"),
    [(1, {}, 0, 0), (8, {}, 4, 0), (8, {"pipeline": {"stages": 2}}, 6, 2), (8, {"pipeline": {"stages": 4}}, 6, 4)],
)
def test_what_a_gpu_needs_beside_tensors_counts_every_communicator(  # as many as are made: `tests/dist/test_groups.py`
    world: int, more: dict[str, Any], groups: int, channels: int
) -> None:
    config = resolved({**config_of(1, ""), **more})
    base = overhead.CONTEXT + overhead.WORKSPACES
    nccl = groups * overhead.COMMUNICATOR + channels * overhead.CHANNEL
    axes = axes_of(config, world)
    assert overhead.estimated(config, axes) == base + nccl
    assert overhead.estimated(config, axes, 3) == base + nccl + 3 * overhead.COMMUNICATOR
    assert overhead.estimated(config, axes, base=7) == 7 + nccl, "a measured one takes the place of the estimate"


def test_a_budget_of_the_whole_device_leaves_what_is_no_tensor() -> None:
    with torch.device("meta"):
        meta = llama()
    config = resolved({**config_of(3, ""), "hf_dist": {"memory_budget": "auto"}})
    one = Planner(meta, 2, Workload(MICRO, SEQ), 10**9).plan(config)
    less = Planner(meta, 2, Workload(MICRO, SEQ), 10**9, lambda *given: 10**9).plan(config)
    assert one.states.kept_nbytes > less.states.kept_nbytes == 0
    assert less.beside == 10**9 and less.device_need == less.device_peak + 10**9
    assert less.over(Limits(device=10**9)) == less.device_peak


def test_the_context_of_a_gpu_is_measured_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert overhead.measured_base() is None and overhead.measured(torch.device("cpu")) is None
    matrix = torch.ones(1)
    said = SimpleNamespace(stdout="100\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 << 30, 11 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 << 20)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "ones", lambda *shape, **how: matrix)
    monkeypatch.setattr(torch, "mm", lambda a, b: a)
    monkeypatch.setattr(overhead.subprocess, "run", lambda *command, **how: said)
    assert overhead.measured_base() == (1 << 30) - (2 << 20) - (100 << 20)
    said.stdout = "[N/A]"
    assert overhead.measured_base() is None


@pytest.mark.parametrize("option", ["--device-memory", "--host-memory"])
def test_a_size_that_is_none_is_refused(tmp_path: Path, option: str) -> None:
    result = plan_command(tmp_path, option, "many")
    assert result.exit_code == 1
    assert "is not a size" in str(result.exception)


def test_more_ranks_need_less_at_stage_3_only() -> None:
    with torch.device("meta"):
        meta = llama()
    held = {
        (stage, world): Planner(meta, world, Workload(MICRO, SEQ)).plan(resolved(config_of(stage, ""))).device_peak
        for stage in (0, 3)
        for world in (1, 8)
    }
    assert held[0, 1] <= held[0, 8]  # by padding
    assert held[3, 8] < held[3, 1]


@pytest.mark.parametrize(("zero", "blocks"), [({}, 2), ({"reduce_bucket_size": 1}, 1), ({"overlap_comm": False}, 0)])
def test_the_plan_counts_the_reductions_that_the_bucket_lets_fly(zero: dict[str, Any], blocks: int) -> None:
    with torch.device("meta"):
        meta = llama(6)
    config = resolved({**config_of(3, ""), "zero_optimization": {"stage": 3, **zero}})
    states = Planner(meta, 2, Workload(MICRO, SEQ)).plan(config).states
    block = states.units[-1].learning
    assert Temporary(states).in_flight([7 * block, block, block, block]) == blocks * block


def test_limits_count_all_ranks_of_a_machine() -> None:
    with torch.device("meta"):
        meta = llama()
    plan = Planner(meta, 2, Workload(MICRO, SEQ)).plan(resolved(config_of(2, "cpu")))
    assert plan.over(Limits(host=plan.host, ranks_per_machine=2)) == plan.host
    assert plan.over(Limits(host=2 * plan.host, ranks_per_machine=2)) == 0


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        (where, kind)
        for where in ("train_batch", "trainer")
        for kind in (torch.OutOfMemoryError, MemoryError, RuntimeError)
        if FULL_GRID or (where == "trainer") == (kind is RuntimeError)
    ],
)
def test_running_out_of_memory_shows_plan_measurement_and_setting(
    kind: type[BaseException], where: str, tmp_path: Path
) -> None:
    import hf_dist
    from hf_dist import DistTrainer, DistTrainingArguments

    class Full(LlamaForCausalLM):
        """Has no memory for a forward."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not kwargs["input_ids"].is_meta and kind is RuntimeError:
                torch.empty(1 << 60, dtype=torch.uint8)  # torch's own error, which words alone do not make
            elif not kwargs["input_ids"].is_meta:
                raise kind("you tried to allocate 20 GiB")
            return super().forward(*args, **kwargs)

    model = Full(llama().config)
    ids = torch.zeros(MICRO, SEQ, dtype=torch.long)
    data = config_of(3, "")
    with pytest.raises(kind) as caught:
        if where == "trainer":
            rows = [{"input_ids": row, "labels": row} for row in ids]
            del data["optimizer"], data["bf16"]
            args = DistTrainingArguments(
                str(tmp_path),
                dist_config=data,
                per_device_train_batch_size=MICRO,
                report_to=[],
                use_cpu=True,
                remove_unused_columns=False,
            )
            DistTrainer(model=model, args=args, train_dataset=rows).train()
        else:
            engine = hf_dist.initialize(model, config=data, device="cpu")
            engine.train_batch(iter([{"input_ids": ids, "labels": ids}]))
    message = str(caught.value)
    for words in ("you tried to allocate", "hf_dist measured", f"microbatches of {MICRO} x {SEQ} tokens"):
        assert words in message
    assert "device, peak" in message
    assert "offload optimizer: saves" in message
