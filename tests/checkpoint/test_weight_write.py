"""All ranks write one HF folder: equal in every byte to what `save_pretrained` of the same model writes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.covering import PAIRS, chosen
from tests.harness import run_ranks

from .families import FAMILIES, VOCAB, Plain, make_model
from .writing import Case, failures, separate_disks, vanishing, write_cases

SIZES: tuple[int | str, ...] = ("50GB", 4000)
MODES = ("parallel", "in order")


def save_stock(model: Any, folder: Path, size: int | str) -> None:
    """What a single process writes without hf_dist."""
    if isinstance(model, Plain):
        state = model.state_dict()
        state.pop("head.weight")  # tied; `save_file` refuses both
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    elif type(model).__name__.startswith("Peft"):
        model.save_pretrained(folder)
    else:
        model.save_pretrained(folder, max_shard_size=size)


def weight_files(folder: Path) -> dict[str, bytes]:
    """Weights and indexes below a folder."""
    paths = [p for p in folder.rglob("*") if p.name.endswith((".safetensors", ".index.json"))]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


def sizes_for(family: str) -> tuple[int | str, ...]:
    return SIZES[:1] if family == "plain" else SIZES  # the stock way has no shards there


Written = tuple[int, str, str, int | str, str]
"""Ranks, family, dtype, size of a file, mode."""
GRID: list[Written] = [
    (world, family, dtype, size, mode)
    for world in (1, 2, 3)
    for family in FAMILIES
    for dtype in ("float32", "bfloat16")
    for size in sizes_for(family)
    for mode in MODES
]
LOADED: list[Written] = [
    (2, family, "float32", SIZES[1], "parallel") for family in FAMILIES if family not in ("plain", "shuffled")
]


def settings(case: Written) -> dict[str, Any]:
    """Beside what is loaded: each other setting, and the families that nothing loads; experts in every dtype."""
    world, family, dtype, *others = case
    alone = family if family in ("plain", "shuffled") else ""
    return dict(enumerate([world, alone, (family in ("deepseek_v3", "gpt_oss", "qwen3_moe"), dtype), *others]))


CHOSEN = list(dict.fromkeys([*LOADED, *chosen(GRID, settings, PAIRS)]))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, int | str], Path]:
    """(family, dtype, size) -> folder written by one process."""
    folders = {}
    for family, dtype, size in dict.fromkeys(case[1:4] for case in CHOSEN):
        folders[family, dtype, size] = tmp_path_factory.mktemp(f"stock_{family}")
        save_stock(make_model(family, getattr(torch, dtype)), folders[family, dtype, size], size)
    return folders


@pytest.fixture(scope="module")
def written(
    stock: dict[tuple[str, str, int | str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[Written, Path]:
    """The folders, written by so many ranks."""
    folders = {case: tmp_path_factory.mktemp("ours") for case in CHOSEN}
    for world in (1, 2, 3):
        here = {case: folder for case, folder in folders.items() if case[0] == world}
        cases: list[Case] = [
            (family, dtype, size, None if mode == "parallel" else mode, str(folder))
            for (_, family, dtype, size, mode), folder in here.items()
        ]
        assert run_ranks(write_cases, world, (cases,)) == [[case[-1] for case in here]] * world
    return folders


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: "-".join(map(str, case)))
def test_files_are_those_of_save_pretrained_in_every_byte(
    case: Written, written: dict[Written, Path], stock: dict[tuple[str, str, int | str], Path]
) -> None:
    _, family, dtype, size, _ = case
    expected = weight_files(stock[family, dtype, size])
    found = weight_files(written[case])
    assert found.keys() == expected.keys()
    assert not [name for name in expected if found[name] != expected[name]]


@pytest.mark.parametrize("case", LOADED, ids=lambda case: case[1])
def test_from_pretrained_gives_the_same_logits(
    case: Written, written: dict[Written, Path], stock: dict[tuple[str, str, int | str], Path]
) -> None:
    family, folder = case[1], written[case]
    model: Any = make_model(family)
    for small in stock[family, "float32", SIZES[1]].rglob("*config.json"):
        (folder / small.relative_to(stock[family, "float32", SIZES[1]])).write_bytes(small.read_bytes())
    loaded = load_again(family, model, folder)
    ids = torch.arange(1, 13).reshape(2, 6) % VOCAB
    inputs: dict[str, Any] = (
        {"pixel_values": torch.randn(2, 3, 8, 8)} if family in ("vit", "dinov2") else {"input_ids": ids}
    )
    if family == "t5":
        inputs["decoder_input_ids"] = ids
    with torch.no_grad():
        assert torch.equal(loaded(**inputs)[0], model(**inputs)[0])


def load_again(family: str, model: Any, folder: Path) -> Any:
    if family == "hf_adapter":
        base = make_model("llama")
        base.load_state_dict(
            {k.replace("base_layer.", ""): v for k, v in model.state_dict().items() if "lora" not in k}
        )
        base.load_adapter(str(folder))
        return base.eval()
    if not hasattr(model, "peft_config"):
        return type(model).from_pretrained(folder, dtype=torch.float32).eval()
    from peft import PeftModel

    base = make_model("llama")
    names = {k: k.replace("base_model.model.", "").replace("base_layer.", "") for k in model.state_dict()}
    names = {k: n.replace("original_module.", "") for k, n in names.items()}
    base.load_state_dict({n: model.state_dict()[k] for k, n in names.items() if n in base.state_dict()})
    loaded = PeftModel.from_pretrained(base, folder)
    if family == "two_adapters":
        loaded.load_adapter(str(folder / "second"), "second")
    return loaded.eval()


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | None]:
    """A file system of 16 kB, smaller than the model, None where mounting is not allowed."""
    folder = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], capture_output=True)
    yield str(folder) if mounted.returncode == 0 else None
    if mounted.returncode == 0:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory, small_disk: str | None) -> list[dict[str, str]]:
    """Failure -> message, per rank."""
    root = tmp_path_factory.mktemp("failures")
    for name in ("good", "missing"):
        (root / name).mkdir()
    return run_ranks(failures, 2, (str(root), small_disk), timeout=120)


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ("limit_parallel", ("rank 1", "model.safetensors", "max_shard_size")),
        ("limit_in_order", ("rank 0", "model.safetensors", "max_shard_size")),
        ("missing", ("model.safetensors", "the ranks hold", "elements")),
        ("absent", ("rank 0", "nowhere", "No such file")),
        ("unwritable", ("rank 0", "/proc/self")),
        ("full", ("No space left", "B free", "save_total_limit")),
    ],
)
def test_a_failed_write_is_one_clear_error_on_every_rank(
    failure: str, says: tuple[str, ...], messages: list[dict[str, str]]
) -> None:
    if failure not in messages[0]:
        pytest.skip("no permission to mount a small file system")
    assert messages[0][failure] == messages[1][failure]
    for part in says:
        assert part in messages[0][failure]


def test_ranks_can_write_after_a_failure(messages: list[dict[str, str]]) -> None:
    assert [m["afterwards"] for m in messages] == ["", ""]


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    first, second = run_ranks(vanishing, 2, (str(tmp_path),), timeout=120)
    assert first == second
    assert "model-00002-of-" in first
    assert "No such file" in first


@pytest.mark.parametrize("other", ["nowhere", "elsewhere"])
def test_without_a_shared_disk_rank_0_writes_everything(other: str, tmp_path: Path) -> None:
    for name in ("stock", "ours", "elsewhere"):
        (tmp_path / name).mkdir()
    save_stock(make_model("qwen3_moe"), tmp_path / "stock", 4000)
    modes = run_ranks(separate_disks, 2, ([str(tmp_path / "ours"), str(tmp_path / other)],), timeout=120)
    assert modes == ["not shared"] * 2
    assert weight_files(tmp_path / "ours") == weight_files(tmp_path / "stock")
    assert not list((tmp_path / "elsewhere").iterdir())
