"""How a model is written to a folder, and how the weights of such a folder are read back into shards."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hf_dist.checkpoint.check_names import check_needed, check_planned, check_shapes
from hf_dist.checkpoint.file_sums import FileSums
from hf_dist.checkpoint.folder import is_inside
from hf_dist.checkpoint.owned_part import OwnedPart
from hf_dist.checkpoint.piece_source import PieceSource
from hf_dist.checkpoint.pieces import Piece
from hf_dist.checkpoint.safetensors_source import FileTensor, SafetensorsFile
from hf_dist.checkpoint.weight_plan import StoredTensor, WeightPlan
from hf_dist.checkpoint.weight_write import write_weights
from hf_dist.dist.mesh import MeshAxis
from hf_dist.errors import CheckpointError
from hf_dist.memory.offload.resting import opened
from hf_dist.sharding.param_slice import held_slice
from hf_dist.sharding.runtime import ShardedModel
from hf_dist.tensors.tensor_slice import TensorSlice

PLAN = "hf_dist_weights.json"
"""Maps elements of parameters to their places in the weight files; used by export and by partial loading."""
_ABOUT = (
    "Written by hf_dist: which elements of which parameter stand where in the weight files. hf_dist reads it to export, or to "
    "resume from this folder. from_pretrained does not read it, and a published model does not need it."
)


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model."""

    plan: WeightPlan | None
    """None if a library's code writes the weights together with the small files."""
    buffers: Sequence[OwnedPart] = ()
    """Persistent buffers, equal on every rank. Rank 0 writes them."""
    write_small_files: Callable[[Path], None] = lambda _: None
    """Writes configuration and similar files. Called on rank 0 with the folder."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the whole parameters that the files must hold, by full name; with `plan` None, of those that they may hold."""
    with_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context that every rank enters while small files are written, so that they may use the weights. Collective to enter."""

    def write(self, folder: Path, parts: Sequence[OwnedPart], axis: MeshAxis, sums: FileSums | None = None) -> None:
        """Write the weights of all ranks, and add up what is written. Collective over `axis`.

        Raises `CheckpointError` on every rank.
        """
        if self.plan is not None:
            parts = [*parts, *self.buffers] if axis.rank == 0 else list(parts)
            write_weights(folder, self.plan, parts, axis, sums=sums)

    def check(self, folder: Path) -> None:
        """Raise `CheckpointError` if the names and shapes in the files differ from the model's. One rank calls it."""
        if self.plan is None:
            check_shapes(folder, self.shapes)
        else:
            check_needed(self.plan, self.shapes)
            check_planned(folder, self.plan)

    def write_plan(self, folder: Path) -> None:
        """Write the plan. One rank calls it."""
        if self.plan is not None:
            (folder / PLAN).write_text(json.dumps({"about": _ABOUT, **self.plan.to_json()}) + "\n", encoding="utf-8")


Maker = Callable[[ShardedModel, str | int], "ModelFiles | None"]
_makers: list[Maker] = []


def register(maker: Maker) -> None:
    """From now on ask `maker` first. It returns None for models that it does not know."""
    if maker not in _makers:
        _makers.insert(0, maker)


def model_files(sharded: ShardedModel, max_shard_size: str | int) -> ModelFiles:
    """The files of the model of `sharded`. `max_shard_size`: bytes, or text such as "5GB", per safetensors file."""
    for maker in _makers:
        files = maker(sharded, max_shard_size)
        if files is not None:
            return files
    return _plain_module(sharded, max_shard_size)


def loaded_dtypes(sharded: ShardedModel) -> dict[str, torch.dtype]:
    """Parameter -> the dtype it was loaded in and is saved in. Covers all parameters, also those of other pipeline stages."""
    whole = {name: p.dtype for name, p in sharded.whole.named_parameters()}
    return whole | {
        slot.name: dtype
        for group in sharded.groups
        for slot, dtype in zip(group.layout.slots, group.loaded_dtypes, strict=True)
    }


def whole_shapes(sharded: ShardedModel) -> dict[str, tuple[int, ...]]:
    """Shapes of all whole parameters by full name, including those in other stages or sliced over ranks."""
    return {name: held_slice(p).whole for name, p in sharded.whole.named_parameters()}


def weights_nbytes(sharded: ShardedModel) -> int:
    """Bytes of all weights in the dtypes they are saved in."""
    dtypes = loaded_dtypes(sharded)
    return sum(held_slice(p).whole_numel * dtypes[name].itemsize for name, p in sharded.whole.named_parameters())


def _plain_module(sharded: ShardedModel, max_shard_size: str | int) -> ModelFiles:
    """Uses the names of `state_dict()`; a tensor with two names is written under the first."""
    dtypes = loaded_dtypes(sharded)
    sharded.synchronize_buffers()
    held = {name: held_slice(p) for name, p in sharded.whole.named_parameters()}
    tensors = [StoredTensor(n, h.whole, dtypes[n], (Piece.whole(n, h.whole_numel),)) for n, h in held.items()]
    persistent = set(sharded.model.state_dict(keep_vars=True))
    buffers = [
        OwnedPart(name, TensorSlice.all(b.shape), 0, b.numel(), b.detach().reshape(-1).clone())
        for name, b in sharded.model.named_buffers()
        if name in persistent
    ]
    tensors += [StoredTensor(b.name, b.held.whole, b.values.dtype, (Piece.whole(b.name, b.stop),)) for b in buffers]
    order = {name: i for i, name in enumerate(sharded.whole.state_dict(keep_vars=True))}
    tensors.sort(key=lambda t: order[t.name])
    return ModelFiles(WeightPlan.pack(tensors, max_shard_size=max_shard_size), buffers, shapes=whole_shapes(sharded))


def read_plan(folder: Path) -> WeightPlan | None:
    """The plan of a folder that hf_dist wrote, None for other folders. Raises `CheckpointError` if it cannot be read."""
    path = folder / PLAN
    if not path.is_file():
        return None
    try:
        plan = WeightPlan.from_json(json.loads(path.read_text(encoding="utf-8")))
        outside = [name for name in (*(file.name for file in plan.files), *plan.indexes) if not is_inside(name)]
        if outside:
            raise ValueError(f"{outside[0]!r} is no file of the folder")
        return plan
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error})") from error


def read_weights(folder: Path, plan: WeightPlan, sharded: ShardedModel, names: Iterable[str] | None = None) -> set[str]:
    """Fill this rank's part of the weights (all, or those in `names`) and the buffers from the weight files. Local.

    Call `weights_changed()` afterwards. Returns the requested names that the folder does not hold.
    """
    files: dict[str, dict[str, FileTensor]] = {}
    wanted = None if names is None else set(names)
    missing: set[str] = set()

    def fill(name: str, start: int, out: torch.Tensor, held: TensorSlice) -> None:
        parts = []
        for place, piece in plan.by_param[name]:
            if place.file not in files:
                files[place.file] = SafetensorsFile(folder / place.file).tensors()
            parts.append((files[place.file][place.tensor.name], piece))
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor, _ in parts))
        source = PieceSource(held.whole, dtype, parts)
        (source if held.everything else source.sliced(held)).read(start, start + out.numel(), out)

    with torch.no_grad():
        for group in sharded.groups:
            slots = [s for s in group.layout.slots if wanted is None or s.name in wanted]
            missing |= {s.name for s in slots if s.name not in plan.by_param}
            held = [(s, *group.fragment(s)) for s in slots if s.name in plan.by_param]
            held = [(slot, first, last) for slot, first, last in held if last > first]
            if held:
                with opened(group.master, changed=True) as masters:
                    for slot, first, last in held:
                        fill(slot.name, group.resting[0] + first - slot.offset, masters[first:last], slot.held)
                group.masters_changed()
        for name, buffer in sharded.model.named_buffers():
            if name in plan.by_param:
                values = torch.empty(buffer.numel(), dtype=buffer.dtype)
                fill(name, 0, values, TensorSlice.all(buffer.shape))
                buffer.copy_(values.view(buffer.shape))
    return missing
