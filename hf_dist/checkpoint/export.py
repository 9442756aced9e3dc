"""`hf-dist export`: a checkpoint's model in another dtype or split into other files, tensor by tensor, without model code.

The weights come from the folder's safetensors files. With fp32, trained weights come from the fp32 master weights of the
training state instead, located by the plan stored with them. Memory: a few MB from files; from the training state 1.5
times the largest parameter, twice where its elements are scattered over the tensor on disk.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hf_dist.checkpoint import dcp, folder, weight_file
from hf_dist.checkpoint.describe import FOREIGN_WEIGHTS, is_training_file
from hf_dist.checkpoint.flat_slice import FlatSlice
from hf_dist.checkpoint.merge_lora import MergedTensor, base_folder, merge
from hf_dist.checkpoint.model_files import read_plan
from hf_dist.checkpoint.pieces import Piece
from hf_dist.checkpoint.safetensors_header import files_of_index
from hf_dist.checkpoint.safetensors_source import FileTensor, SafetensorsFile
from hf_dist.checkpoint.weight_file import OpenFiles
from hf_dist.checkpoint.weight_plan import Extent, StoredTensor, WeightPlan
from hf_dist.checkpoint.weight_write import CHUNK
from hf_dist.errors import CheckpointError
from hf_dist.format_bytes import size_text
from hf_dist.sharding.precision import DTYPES

__all__ = ["export"]

_WEIGHTS = re.compile(r"(?:adapter_)?model(-\d{5}-of-\d{5})?\.safetensors")
_ADAPTER_FILES = ("adapter_config.json", "README.md")
_MASTER = "weights."
UNLIMITED = 2**62


@dataclass(frozen=True)
class _Source:
    """The sources of a checkpoint's weights."""

    folder: Path
    files: Mapping[str, Mapping[str, FileTensor | MergedTensor]]
    """Weight file, relative to the folder -> its tensors."""
    plan: WeightPlan | None
    masters: Mapping[str, tuple[int, ...]]
    """Parameter -> shape, for fp32 master weights that replace the values in the files."""


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    merge_lora: bool = False,
    base: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """Write the model in `checkpoint` as an HF folder `out`, which must be empty or not exist. Needs no process group.

    `dtype`: bf16, fp16, fp32 (from the fp32 master weights, where the checkpoint has them), or None to keep dtypes. Weights
    that a half-precision model keeps in fp32 stay fp32. `merge_lora`: the folder holds an adapter; write its base model with
    the adapter added (`merge_lora.py` lists which adapters); `base` is that model's folder or ID, by default the one that the
    adapter names. `report` receives progress lines. `out` appears only once it is
    complete. Raises `CheckpointError`.
    """
    source, target = Path(checkpoint), Path(out)
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists already: export into a folder that does not exist, or is empty")
    if base is not None and not merge_lora:
        raise CheckpointError(f"--base {base} is read with --merge-lora only: add that, or leave --base out")
    weights = _find_weights(source, dtype)
    if merge_lora:
        whole = _find_weights(base_folder(source, base), None)
        weights = replace(whole, files=merge(source, whole.files), plan=None)
    main = _main_dtype(weights)
    wanted = main if dtype is None else DTYPES[dtype]
    plan = _new_plan(weights, main, wanted, max_shard_size)
    try:
        working = folder.begin(target)
        for file in plan.files:
            weight_file.create(working, file)
        with OpenFiles(working) as files:
            _write(weights, plan, files, report)
        for beside in dict.fromkeys((weights.folder, source)):
            _copy_small_files(beside, working, main, wanted, skip=_ADAPTER_FILES if merge_lora else ())
        for name, content in plan.indexes.items():
            (working / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for file in plan.files:
            problem = weight_file.difference(working, file)
            if problem is not None:
                raise CheckpointError(problem)
        if target.exists():
            target.rmdir()
        os.rename(working, target)
    except OSError as error:
        raise CheckpointError(weight_file.explain(error, target)) from error
    finally:
        shutil.rmtree(folder.working_folder(target), ignore_errors=True)
    name = str(wanted).removeprefix("torch.")
    report(f"{target}: {size_text(plan.nbytes)} of weights in {name}, {len(plan.files)} files")


# ---- source


def _find_weights(source: Path, dtype: str | None) -> _Source:
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a folder")
    if (source / folder.MANIFEST).exists():
        problems = folder.incomplete(source)
        if problems:
            raise CheckpointError(f"{source} is not complete: {'; '.join(problems[:3])}. Export an older checkpoint.")
    paths = [p for below in (source, *_adapter_folders(source)) for p in sorted(below.glob("*.safetensors"))]
    files = {str(p.relative_to(source)): SafetensorsFile(p).tensors() for p in paths if _WEIGHTS.fullmatch(p.name)}
    if not files:
        raise CheckpointError(f"{source} holds no safetensors weights. {_what_else(source)}")
    _check_index(source, files)
    plan = read_plan(source)
    masters: dict[str, tuple[int, ...]] = {}
    if dtype == "fp32" and plan is not None and (source / folder.STATE).is_dir():
        stored = dcp.stored_tensors(source / folder.STATE)
        names = {name.removeprefix(_MASTER): shape for name, (shape, _) in stored.items() if name.startswith(_MASTER)}
        masters = {name: shape for name, shape in names.items() if name in plan.by_param}
    return _Source(source, files, plan, masters)


def _adapter_folders(source: Path) -> list[Path]:
    """PEFT keeps every adapter except `default` in its own folder."""
    return sorted(p.parent for p in source.glob("*/adapter_config.json"))


def _what_else(source: Path) -> str:
    for pattern, advice in FOREIGN_WEIGHTS:
        if any(source.glob(pattern)):
            return advice
    return "Name a folder that contains model.safetensors, such as checkpoint-100."


def _check_index(source: Path, files: Iterable[str]) -> None:
    """Check that all files named by an index exist, and no others: leftovers of an earlier save would be mixed in."""
    path = source / "model.safetensors.index.json"
    base = {name for name in files if Path(name).name.startswith("model")}
    if "model.safetensors" in base or not path.is_file():
        numbered = sorted(base - {"model.safetensors"})
        if numbered:
            raise CheckpointError(
                f"{source}: {numbered[0]} does not belong here: there is no model.safetensors.index.json"
            )
        return
    named = files_of_index(path)
    for name in sorted(named ^ base):
        reason = "is missing" if name in named else "is not named in model.safetensors.index.json"
        raise CheckpointError(f"{source}: {name} {reason}. The folder is incomplete, or mixed from two saves.")


def _main_dtype(source: _Source) -> torch.dtype:
    """The dtype of most elements."""
    numel: dict[torch.dtype, int] = {}
    for tensors in source.files.values():
        for tensor in tensors.values():
            if tensor.dtype.is_floating_point:
                numel[tensor.dtype] = numel.get(tensor.dtype, 0) + tensor.numel
    return max(numel, key=lambda d: numel[d]) if numel else torch.float32


# ---- plan


def _new_plan(source: _Source, main: torch.dtype, wanted: torch.dtype, max_shard_size: int | str) -> WeightPlan:
    """The same tensors under the same names; only dtypes and the split into files may change."""
    old = () if source.plan is None else (extent for file in source.plan.files for extent in file.extents)
    pieces = {(extent.file, extent.tensor.name): extent.tensor.pieces for extent in old}
    groups: dict[tuple[str, str], list[StoredTensor]] = {}
    for file, tensors in source.files.items():
        below, name = os.path.split(file)
        group = groups.setdefault((below and f"{below}/", re.sub(r"-\d{5}-of-\d{5}", "", name)), [])
        for tensor in tensors.values():
            whole = (Piece.whole(tensor.name, tensor.numel),)
            cast = tensor.dtype == main or (wanted == torch.float32 and tensor.dtype.is_floating_point)
            dtype = wanted if cast else tensor.dtype
            group.append(StoredTensor(tensor.name, tensor.shape, dtype, pieces.get((file, tensor.name), whole)))
    plans = []
    for (below, name), stored in groups.items():
        index = source.folder / below / f"{name}.index.json"
        metadata = json.loads(index.read_text(encoding="utf-8"))["metadata"] if index.is_file() else {}
        size = UNLIMITED if name.startswith("adapter") else max_shard_size  # PEFT reads one file
        stored.sort(key=lambda tensor: _natural(tensor.name))
        plan = WeightPlan.pack(stored, weights_name=name, max_shard_size=size, metadata=metadata)
        plans.append((below, plan))
    return WeightPlan.join(plans)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


# ---- writing


def _write(source: _Source, plan: WeightPlan, files: OpenFiles, report: Callable[[str], None]) -> None:
    tensors = {(os.path.dirname(f), t.name): t for f, ts in source.files.items() for t in ts.values()}
    scattered = []
    for file in plan.files:
        report(f"{file.name}: {size_text(file.nbytes)}")
        for extent in file.extents:
            masters = [piece.param in source.masters for piece in extent.tensor.pieces]
            if not any(masters):
                _copy(tensors[os.path.dirname(file.name), extent.tensor.name], extent, files)
            elif not all(masters) or any(piece.scattered for piece in extent.tensor.pieces):
                scattered.append(extent)
    for name, shape in source.masters.items():
        extents = [(extent, piece) for extent, piece in plan.by_param[name] if extent not in scattered]
        numel = math.prod(shape)
        # In halves: during a read DCP holds a piece as large as one rank's part, which may be the whole parameter.
        for start, stop in ((0, numel // 2), (numel // 2, numel)):
            if extents and start < stop:
                _write_runs(_master(source, name, start, stop), start, extents, files)
    for extent in scattered:
        _write_assembled(source, tensors[os.path.dirname(extent.file), extent.tensor.name], extent, files)


def _copy(tensor: FileTensor | MergedTensor, extent: Extent, files: OpenFiles) -> None:
    """Copy from file to file, a few MB at a time."""
    step = CHUNK // 8
    buffer = torch.empty(min(step, tensor.numel), dtype=tensor.dtype)
    for start in range(0, tensor.numel, step):
        part = buffer[: min(step, tensor.numel - start)]
        tensor.read(start, start + part.numel(), part)
        _put(part, extent, start, files)


def _put(values: torch.Tensor, extent: Extent, start: int, files: OpenFiles) -> None:
    dtype = extent.tensor.dtype
    files.write(extent.file, extent.offset + start * dtype.itemsize, values.to(dtype).view(torch.uint8))


def _master(source: _Source, name: str, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a parameter in fp32."""
    values = torch.empty(stop - start)
    dcp.read_state(source.folder / folder.STATE, {_MASTER + name: FlatSlice(values, start, source.masters[name])})
    return values


def _write_runs(values: torch.Tensor, start: int, extents: Iterable[tuple[Extent, Piece]], files: OpenFiles) -> None:
    """Write elements [start, start + len(values)) of a parameter."""
    step = CHUNK // 4
    for extent, piece in extents:
        for run in piece.runs(start, start + values.numel()):
            own = values[run.source - start : run.source - start + run.numel]
            for first in range(0, run.numel, step):
                _put(own[first : first + step], extent, run.target + first, files)


def _write_assembled(source: _Source, old: FileTensor | MergedTensor, extent: Extent, files: OpenFiles) -> None:
    """Write a tensor made of scattered elements, or of trained and frozen parameters together."""
    values: torch.Tensor | None = None
    for piece in extent.tensor.pieces:
        if piece.param not in source.masters:
            continue
        param = _master(source, piece.param, 0, math.prod(source.masters[piece.param]))
        if values is None:  # as late as possible: reading the parameter takes twice its size
            values = _whole(old).to(extent.tensor.dtype)
        box = values.as_strided(piece.sizes, piece.target_strides, piece.target_offset)
        box.copy_(param.as_strided(piece.sizes, piece.strides, piece.offset))
    assert values is not None
    _put(values, extent, 0, files)


def _whole(tensor: FileTensor | MergedTensor) -> torch.Tensor:
    values = torch.empty(tensor.numel, dtype=tensor.dtype)
    tensor.read(0, tensor.numel, values)
    return values


# ---- other files


def _copy_small_files(source: Path, working: Path, main: torch.dtype, wanted: torch.dtype, skip: Iterable[str]) -> None:
    """Copy configuration, tokenizer and model code, but nothing of the training state."""
    for below in (source, *_adapter_folders(source)):
        for path in sorted(below.iterdir()):
            into = working / path.relative_to(source)
            if not path.is_file() or path.name in skip or is_training_file(path.name) or _is_weight_file(path.name):
                continue
            into.parent.mkdir(exist_ok=True)
            if path.name == "config.json" and main != wanted:
                config = json.loads(path.read_text(encoding="utf-8"))
                _rename_dtype(config, str(main).removeprefix("torch."), str(wanted).removeprefix("torch."))
                into.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            else:
                shutil.copyfile(path, into)


def _is_weight_file(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json", ".bin.index.json"))


def _rename_dtype(config: Any, old: str, new: str) -> None:
    """Rename the dtype in the configuration and in those of sub-models (`text_config`)."""
    for key, value in config.items():
        if isinstance(value, dict):
            _rename_dtype(value, old, new)
        elif key in ("dtype", "torch_dtype") and value == old:
            config[key] = new
