"""`hf-dist export` and `hf-dist inspect`: the model of any folder, without a model; memory stays flat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_dist.checkpoint.describe import describe
from hf_dist.checkpoint.export import export
from hf_dist.errors import CheckpointError, ConfigError
from hf_dist.tools.cli import app
from tests.covering import FULL_GRID
from tests.harness import run_ranks

from .families import make_model
from .test_weight_write import save_stock

RUNNER = CliRunner()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the weight files below a folder."""
    return {k: v for path in sorted(folder.rglob("*.safetensors")) for k, v in load_file(path).items()}


def save_families(rank: int, world: int, folders: dict[str, Path]) -> dict[str, dict[str, torch.Tensor] | None]:
    """`save_trained` of each."""
    return {family: save_trained(rank, world, family, str(folder)) for family, folder in folders.items()}


def save_trained(rank: int, world: int, family: str, folder: str) -> dict[str, torch.Tensor] | None:
    """Save a bf16 model after three steps, the embedding and halves of tensors in files frozen.

    Returns the fp32 weights under the names in memory.
    """
    import hf_dist
    from hf_dist.dist import collectives

    model: Any = make_model(family, torch.bfloat16)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith(("embed_tokens.weight", "mlp.gate_proj.weight")))
    config = {
        "train_batch_size": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }  # fmt: skip
    engine = hf_dist.initialize(model, config=config)
    for _ in range(3):
        ids = torch.arange(1 + rank, 9 + rank)[None].expand(2 // world, 8)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(folder)
    whole = {}
    for group in engine.sharded.groups:
        start, stop = group.resting
        full = torch.zeros(group.layout.numel)
        full[start:stop] = group.source
        if stop - start < full.numel():
            collectives.all_gather(engine.mesh.shard, full).wait()
        whole.update({s.name: full[s.offset : s.stop].view(s.shape) for s in group.layout.slots})
    return whole if rank == 0 else None


FAMILIES = ("qwen3_moe", "shuffled")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """Family -> checkpoint of hf_dist, fp32 weights; one spawn."""
    folders = {family: tmp_path_factory.mktemp("trained") / "checkpoint-3" for family in FAMILIES}
    weights = run_ranks(save_families, 2, (folders,))[0]
    return {family: (folder, weights[family]) for family, folder in folders.items()}


@pytest.fixture(scope="module", params=FAMILIES)
def trained(
    request: pytest.FixtureRequest, saved: dict[str, tuple[Path, dict[str, torch.Tensor]]]
) -> tuple[str, Path, Path]:
    """(family, checkpoint of hf_dist, what one process would save of its fp32 weights)."""
    folder, weights = saved[request.param]
    model: Any = make_model(request.param)
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    model.save_pretrained(folder.parent / "fp32")
    return request.param, folder, folder.parent / "fp32"


def test_fp32_comes_from_the_master_weights(trained: tuple[str, Path, Path], tmp_path: Path) -> None:
    _, checkpoint, expected = trained
    export(checkpoint, tmp_path / "out", dtype="fp32", max_shard_size="20KB")
    found, wanted = tensors(tmp_path / "out"), tensors(expected)
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]
    rounded = tensors(checkpoint)
    assert any(not torch.equal(found[name], rounded[name].float()) for name in wanted)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_without_a_dtype_the_tensors_stay_and_the_training_state_goes(
    trained: tuple[str, Path, Path], tmp_path: Path
) -> None:
    _, checkpoint, _ = trained
    export(checkpoint, tmp_path / "out")
    found, wanted = tensors(tmp_path / "out"), tensors(checkpoint)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], wanted[n]) and found[n].dtype == wanted[n].dtype for n in wanted)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}


def test_an_exported_folder_is_loaded_by_from_pretrained(trained: tuple[str, Path, Path], tmp_path: Path) -> None:
    family, checkpoint, expected = trained
    if family == "shuffled":
        pytest.skip("its names on disk are invented")
    export(checkpoint, tmp_path / "out", dtype="fp32")
    loader: Any = type(make_model(family))
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        mine, stock = (loader.from_pretrained(f).eval()(input_ids=ids).logits for f in (tmp_path / "out", expected))
    assert torch.equal(mine, stock)


@pytest.mark.parametrize("family", ["llama_tied", "mixtral", "lora_modules", "two_adapters"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_any_hf_folder_can_be_cast(family: str, dtype: str, tmp_path: Path) -> None:
    model: Any = make_model(family)
    save_stock(model, tmp_path / "in", 4000)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    (tmp_path / "in" / "optimizer.pt").write_text("not for export")
    export(tmp_path / "in", tmp_path / "out", dtype=dtype, max_shard_size="8KB")
    wanted_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    for below in ("", "second"):
        found, wanted = (
            {k: v for p in (tmp_path / f / below).glob("*.safetensors") for k, v in load_file(p).items()}
            for f in ("out", "in")
        )
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name].to(wanted_dtype)) for name in wanted)
    out = {p.name for p in (tmp_path / "out").iterdir()}
    assert "tokenizer.json" in out
    assert "optimizer.pt" not in out
    assert describe(tmp_path / "out").complete


def test_weights_kept_in_fp32_by_a_bf16_model_stay(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    state = {"big": torch.randn(64).bfloat16(), "router_bias": torch.randn(4), "count": torch.tensor(3)}
    save_file(state, tmp_path / "in" / "model.safetensors")
    export(tmp_path / "in", tmp_path / "half", dtype="fp16")
    export(tmp_path / "in", tmp_path / "full", dtype="fp32")
    assert {k: v.dtype for k, v in tensors(tmp_path / "half").items()} == {
        "big": torch.float16, "router_bias": torch.float32, "count": torch.int64
    }  # fmt: skip
    assert {k: v.dtype for k, v in tensors(tmp_path / "full").items()} == {
        "big": torch.float32, "router_bias": torch.float32, "count": torch.int64
    }  # fmt: skip


MEASURE = """
import sys, torch
from hf_dist.checkpoint import model_files, safetensors_source, dcp
from hf_dist.checkpoint.export import export
def peak(): return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
for dtype in sys.argv[3:]:
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    export(sys.argv[1], sys.argv[2] + "/" + dtype, dtype=dtype)
    print(peak() - before)
"""


def peak_memory(source: Path, out: Path, *dtypes: str) -> list[int]:
    """Bytes of resident memory that each export adds, to folders in `out`, in a process of their own."""
    command = [sys.executable, "-c", MEASURE, str(source), str(out), *dtypes]
    # glibc keeps freed blocks of up to 32 MB; at the size of a real model everything that counts is larger.
    env = dict(os.environ, OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="1000000")
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return [int(line) for line in done.stdout.split()[-len(dtypes) :]]


def save_large(rank: int, world: int, folder: str) -> None:
    """A bf16 checkpoint with training state: 3 matrices of 38 MB in fp32."""
    import hf_dist

    matrices = [torch.nn.Linear(3072, 3072, bias=False, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    model = torch.nn.Sequential(*matrices).to_empty(device="cpu")
    for shift, p in enumerate(model.parameters()):  # whole numbers that bf16 has, in a period that no piece has
        p.data.copy_(((torch.arange(p.numel(), dtype=torch.int32) + shift) % 251).view_as(p))
    config = {
        "train_batch_size": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
    }  # fmt: skip
    hf_dist.initialize(model, config=config).save_checkpoint(folder)


def test_memory_stays_below_two_largest_tensors_and_all_pieces_of_them_arrive(tmp_path: Path) -> None:
    run_ranks(save_large, 2, (str(tmp_path / "in"),))
    (tmp_path / "in" / "config.json").write_text("{}")
    largest = 3072 * 3072 * 4
    dtypes = {"fp32": torch.float32, **({"fp16": torch.float16} if FULL_GRID else {})}
    assert max(peak_memory(tmp_path / "in", tmp_path, *dtypes)) < 2 * largest
    wanted = tensors(tmp_path / "in")
    for folder, dtype in dtypes.items():
        found = tensors(tmp_path / folder)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name].to(dtype)) for name in wanted), folder


def broken(folder: Path, what: str) -> None:
    """Damage a folder with two weight files."""
    second = sorted(folder.glob("model-*.safetensors"))[1]
    if what == "missing":
        second.unlink()
    elif what == "truncated":
        os.truncate(second, second.stat().st_size - 10)
    elif what == "mixed":
        (folder / "model-00009-of-00009.safetensors").write_bytes(second.read_bytes())


@pytest.mark.parametrize("what", ["missing", "truncated", "mixed"])
def test_a_damaged_folder_is_refused_by_name(what: str, tmp_path: Path) -> None:
    save_stock(make_model("llama"), tmp_path / "in", 4000)
    broken(tmp_path / "in", what)
    with pytest.raises(CheckpointError, match=r"model-0000\d-of-0000\d.safetensors"):
        export(tmp_path / "in", tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
    assert describe(tmp_path / "in").complete == (what == "mixed")


def test_what_cannot_be_exported_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "deepspeed" / "global_step5").mkdir(parents=True)
    (tmp_path / "deepspeed" / "global_step5" / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="zero_to_fp32"):
        export(tmp_path / "deepspeed", tmp_path / "out")
    with pytest.raises(CheckpointError, match="not a folder"):
        export(tmp_path / "nowhere", tmp_path / "out")
    save_stock(make_model("llama"), tmp_path / "in", 4000)
    with pytest.raises(CheckpointError, match="exists already"):
        export(tmp_path / "in", tmp_path / "deepspeed")
    with pytest.raises(CheckpointError, match="bf16, fp16, fp32"):
        export(tmp_path / "in", tmp_path / "out", dtype="int3")
    with pytest.raises(ConfigError, match="max_shard_size"):
        export(tmp_path / "in", tmp_path / "out", max_shard_size="large")


def test_an_interrupted_checkpoint_is_refused_and_said_to_be_incomplete(
    trained: tuple[str, Path, Path], tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(trained[1], tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "hf_dist.json").unlink()
    found = describe(tmp_path / "checkpoint-3")
    assert (found.kind, found.complete) == ("hf_dist", False)
    shutil.copytree(trained[1], tmp_path / "checkpoint-4")
    next((tmp_path / "checkpoint-4" / "hf_dist_state").glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"distcp is missing"):
        export(tmp_path / "checkpoint-4", tmp_path / "out")
    result = RUNNER.invoke(app, ["inspect", str(tmp_path / "checkpoint-4")])
    assert result.exit_code == 1
    assert "distcp is missing" in result.stdout


def test_inspect_says_step_layout_and_sizes(trained: tuple[str, Path, Path]) -> None:
    result = RUNNER.invoke(app, ["inspect", str(trained[1]), "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["kind"], found["complete"], found["step"]) == ("hf_dist", True, 3)
    assert found["layout"]["world_size"] == 2
    assert found["layout"]["zero_stage"] == 3
    stored = tensors(trained[1])
    assert found["weights"]["tensors"] == len(stored)
    assert found["weights"]["by_dtype"]["BF16"] == sum(t.numel() for t in stored.values())
    assert found["state"]["optimizer_states"] == ["exp_avg", "exp_avg_sq", "step"]
    text = RUNNER.invoke(app, ["inspect", str(trained[1])]).stdout
    assert "complete" in text
    assert "zero stage 3" in text


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["trainer_state.json", "optimizer.pt", "config.json"], "stock Trainer"),
        (["trainer_state.json", "latest", "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeed"),
        (["latest_universal", "global_step3_universal/zero/w/fp32.pt"], "DeepSpeed (universal)"),
        (["zero/model.w/fp32.pt"], "DeepSpeed (universal)"),
        (["trainer_state.json", "pytorch_model_fsdp_0/.metadata"], "FSDP (accelerate)"),
        (["adapter_config.json"], "PEFT adapter"),
        (["config.json"], "Hugging Face model"),
    ],
)
def test_inspect_knows_the_checkpoints_of_others(files: list[str], kind: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"global_step": 7}' if name == "trainer_state.json" else "{}")
    found = describe(tmp_path)
    assert found.kind == kind
    assert found.step == (7 if "trainer_state.json" in files else None)


def test_inspect_lists_the_checkpoints_of_a_run_and_counts_its_final_model_once(tmp_path: Path) -> None:
    for place in ("", "checkpoint-10", "checkpoint-2"):
        (tmp_path / place).mkdir(exist_ok=True)
        save_file({"w": torch.zeros(3, 4)}, tmp_path / place / "model.safetensors")
        (tmp_path / place / "trainer_state.json").write_text('{"global_step": 10}')
    (tmp_path / "checkpoint-12").mkdir()
    found = describe(tmp_path)
    assert found.kind == "output folder of a run" and found.complete
    assert found.weights["parameters"] == 12
    assert sorted(found.files) == ["model.safetensors", "trainer_state.json"]
    assert [(each["name"], each["complete"]) for each in found.checkpoints] == [
        ("checkpoint-2", True), ("checkpoint-10", True), ("checkpoint-12", False)
    ]  # fmt: skip
    text = CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
    assert "checkpoint-10: step 10, complete" in text and "checkpoint-12: step 12, NOT COMPLETE" in text


def test_the_command_exports(tmp_path: Path) -> None:
    save_stock(make_model("llama"), tmp_path / "in", 4000)
    result = RUNNER.invoke(app, ["export", str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "bf16"])
    assert result.exit_code == 0
    assert "bfloat16" in result.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()
