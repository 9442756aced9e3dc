"""`hf-dist bench` on a tiny llama and two ranks: rows agree, files are there, engines are skipped, fail, or are misspelt."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_dist.tools.bench.rounds import Run, summarize
from hf_dist.tools.bench.work import WARMUP, Contender, Work
from hf_dist.tools.cli.bench import _files
from tests import forked
from tests.covering import FULL_GRID
from tests.harness import ROOT, run_ranks

STEPS = 3
OURS = ("zero3", "tp_zero2", "pp") if FULL_GRID else ("pp",)
"""Shipped configs; by default one whose ranks share rows."""
PEERS = ("ddp", "fsdp2") if FULL_GRID else ("fsdp2",)
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def tiny(folder: Path) -> Path:
    """The config of a llama of two layers."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64,
        vocab_size=128, max_position_embeddings=64, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder / "model")
    return folder / "model"


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with a tiny model, one round of few steps."""
    few = ("--steps", str(STEPS), "--rounds", "1", "--seq", "16", "--output", str(folder / "out"))
    command = [sys.executable, "-m", "hf_dist.tools.cli", "bench", "--model", str(tiny(folder)), *few, *arguments]
    return forked.run(command, cwd=ROOT, apart=True, timeout=600)


def test_engines_do_the_same_work_and_are_shown_side_by_side(tmp_path: Path) -> None:
    """Where ranks share rows, each data rank has more microbatches. deepspeed stands for what is not installed: the interpreter
    that is named has no packages.
    """
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    engines = ("--engines", ",".join(["hf_dist", *PEERS, "deepspeed"]), "--deepspeed-python", str(bare))
    layout = (
        "--dtype",
        "fp32",
        "--accumulation",
        "2",
        "--config",
        *(f"configs/{name}.json" for name in OURS),
    )
    result = bench(tmp_path, *engines, *layout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "deepspeed is skipped: deepspeed not installed" in result.stdout
    for word in ("tokens/s", "peak memory", "sent per step", "of it waiting", "losses agree", "load of the machine"):
        assert word in result.stdout
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == [*(f"hf_dist {name}.json" for name in OURS), *PEERS]
    for row in rows.values():
        assert not row["error"]
        assert row["difference"] < 1e-6
        assert len(row["losses"]) == WARMUP + STEPS + 1
        assert row["peak_nbytes"] > 0
        assert sum(row["phases"].values()) == pytest.approx(row["step_seconds"], rel=0.2)
        assert 0 <= row["waiting_seconds"] <= row["step_seconds"]
        assert row["first_step_seconds"] > row["import_seconds"] > 0
    params = 2 * 128 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    # Of two ranks each sends all gradients once: a half to be summed, a half of sums.
    assert "ddp" not in PEERS or rows["ddp"]["sent_nbytes"] == pytest.approx(4 * params, rel=0.01)
    # Two microbatches: each gathers half of the weights twice, blocks apart from the rest, and reduces half of the gradients.
    assert 2 * 2 * 3 * params * 0.5 < rows["fsdp2"]["sent_nbytes"] <= 4 * 2 * 3 * params * 0.5 * 1.02
    assert found["work"]["tokens_per_step"] == 2 * 2 * 16
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == (["bench.json", "bench.png", "bench.svg"] if HAS_MATPLOTLIB else ["bench.json"])
    assert HAS_MATPLOTLIB or 'pip install "hf-dist[bench]"' in result.stdout


def test_a_picture_can_be_named_alone(tmp_path: Path) -> None:
    assert _files(tmp_path / "mine.svg") == (tmp_path / "mine.json", [tmp_path / "mine.svg"])
    folder = tmp_path / "out"
    assert _files(folder) == (folder / "bench.json", [folder / "bench.png", folder / "bench.svg"])


def test_an_engine_that_fails_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    # Passes as a config; the rank finds that two do not divide by three.
    broken.write_text('{"zero_optimization": {"stage": 3, "mics_shard_size": 3}}')
    result = bench(tmp_path, "--engines", "hf_dist", "--config", str(broken), "configs/zero2.json")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "hf_dist broken.json failed: " in result.stdout
    assert "mics_shard_size" in result.stdout
    rows = json.loads((tmp_path / "out" / "bench.json").read_text())["rows"]
    assert [bool(row["error"]) for row in rows] == [True, False]
    assert rows[1]["ratio"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engines", "hf_dist,fdsp2"), 'fdsp2 is not an engine. Did you mean "fsdp2"?'),
        (("--engines", "hf_dist,horovod"), "horovod is not an engine. There are hf_dist, fsdp2"),
        (("--dtype", "fp16"), "--dtype: fp16 is not fp32 or bf16"),
    ],
    ids=["typo", "unknown", "precision"],
)
def test_wrong_options_are_named_before_anything_runs(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    config = () if "--config" in arguments else ("--config", "configs/zero3.json")
    result = bench(tmp_path, *config, *arguments)
    assert result.returncode == 1
    assert message in result.stderr


def rank_record(seconds: float, loss: float) -> dict[str, Any]:
    """What a rank measures, made up."""
    return {
        "step_seconds": [seconds, 2 * seconds], "phases": {"forward": seconds / 2, "backward": seconds}, "peak_nbytes": 10,
        "sent_nbytes": None, "waiting_seconds": None, "first_step_seconds": 3.0, "import_seconds": 1.0, "losses": [1.0, loss],
    }  # fmt: skip


def test_rows_say_when_the_numbers_of_two_engines_differ() -> None:
    work = Work(
        folder="", weights="", class_name="", dtype="fp32", reduce_dtype="fp32", ranks=2, steps=2, micro_batch=1,
        window=2, clip=1.0, tokens_per_step=100, unit="tokens", device="cpu",
    )  # fmt: skip
    contenders = [Contender("a", "a"), Contender("b", "b"), Contender("c", "c")]
    runs = [
        Run(0, 0, 0.0, [rank_record(1.0, 2.0), rank_record(2.0, 4.0)]),
        Run(1, 0, 0.0, [rank_record(1.0, 3.0), rank_record(1.0, 3.0)]),
        Run(2, 0, 0.0, [rank_record(1.0, 3.3), rank_record(1.0, 3.0)]),
    ]
    first, same, other = summarize(work, contenders, runs)
    assert first.step_seconds == 3.0, "the slower rank counts: steps of 2 and 4 seconds"
    assert same.ratio == pytest.approx(2.0)
    assert same.agrees and first.losses == [1.0, 3.0]
    assert not other.agrees
    assert other.difference == pytest.approx(0.05)
    assert first.sent_nbytes is None and first.waiting_seconds is None
    assert first.phases == {"forward": pytest.approx(1.0), "backward": pytest.approx(2.0)}


def count_both_ways(rank: int, world: int) -> tuple[int, int | None]:
    """Bytes of one of our steps by our own counter, and as torch dispatches them."""
    import torch

    import hf_dist
    from hf_dist.tools.bench.wire import DispatchCounter, OwnCounter

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine = hf_dist.initialize(model, config=config)
    own, dispatched = OwnCounter(), DispatchCounter()
    for step in range(2):
        if step == 1:
            own.__enter__()
            dispatched.__enter__()
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    dispatched.__exit__(None, None, None)
    own.__exit__(None, None, None)
    return own.nbytes() or 0, dispatched.nbytes()


def test_both_counters_find_the_same_bytes() -> None:
    for own, dispatched in run_ranks(count_both_ways, 2):
        assert own == dispatched
        assert own > 0


def test_importing_hf_dist_pulls_in_nothing_slow() -> None:
    """Names, not seconds: what each entry point must not import. transformers imports accelerate by itself."""
    slow = [
        "datasets",
        "pandas",
        "pyarrow",
        "peft",
        "trl",
        "transformers.trainer",
        "typer",
        "rich",
        "matplotlib",
    ]
    heavy = ["torch", "transformers", "pydantic", "accelerate"]
    library = {
        "import hf_dist": [*heavy, *slow],
    }
    if FULL_GRID:  # they import torch and transformers
        library["from hf_dist import initialize, gathered, Engine"] = slow
        library["from hf_dist import from_pretrained"] = slow
    command = {"import hf_dist.tools.cli": [*heavy[:2], *(name for name in slow if name not in ("typer", "rich"))]}
    for steps in (library, command):  # an interpreter each
        code = "import sys"
        for statement, forbidden in steps.items():
            code += f"\n{statement}\nprint([m for m in {forbidden} if m in sys.modules])"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.splitlines() == ["[]"] * len(steps), f"{list(steps)} import {result.stdout}"
