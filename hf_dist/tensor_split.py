"""Tensor parallelism on sharded weights: a model cut along `tp`, and what becomes of the gradients of what is not cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hf_dist import collectives
from hf_dist.boxes import TensorSlice
from hf_dist.config import DistConfig, settled
from hf_dist.errors import ConfigError, ModelError
from hf_dist.mesh import ParallelMesh
from hf_dist.sharding.group_axes import Combination
from hf_dist.sharding.guard import replace_method
from hf_dist.sharding.held import held_slice, keep_slice
from hf_dist.sharding.quantised import is_packed
from hf_dist.sharding.slices import SlicedShare
from hf_dist.sharding.units import find_unit_modules
from hf_dist.tensor_parallel.choose import choose_plan
from hf_dist.tensor_parallel.peers import MeshPeers
from hf_dist.tensor_parallel.plan import SplitPlan, unwrapped
from hf_dist.tensor_parallel.slices import sharing_of
from hf_dist.tensor_parallel.split import SplitModel

__all__ = ["TensorSplit", "plan_tensors", "split_tensors"]


@dataclass(frozen=True)
class TensorSplit:
    """A model of which this rank holds slices."""

    model: SplitModel
    share: SlicedShare
    """What the sharded groups have to know."""

    def describe(self) -> list[str]:
        """For the start-up report."""
        return [self.model.describe()]


def plan_tensors(model: nn.Module, config: DistConfig, mesh: ParallelMesh) -> SplitPlan:
    """What of `model` is cut along `tp`, and where activations cross: rank 0 chooses and verifies it for all.

    Collective over world. Raises `ModelError`, on every rank, for a model that cannot be cut, or not between so many ranks.
    """
    found: SplitPlan | str | None = None
    if mesh.world.rank == 0:
        try:
            base, given = unwrapped(model)[0], config.tensor_parallel.partition_config
            # Between pipeline stages whole sequences travel.
            sequence = settled(config.hf_dist.sequence_regions) if mesh.pp.size == 1 else False
            found = choose_plan(base, mesh.tp.size, find_unit_modules, given, sequence)
        except (ModelError, ConfigError) as error:
            found = str(error)
    found = collectives.broadcast_object(mesh.world, found)
    if isinstance(found, str):
        raise ModelError(found)
    assert found is not None
    return found


def split_tensors(model: nn.Module, plan: SplitPlan, mesh: ParallelMesh) -> TensorSplit:
    """Cut `model` in place along `tp`. Nothing is read of weights that are still in their files. Collective over world.

    Raises `ModelError`, on every rank, for sizes that do not divide, before anything is cut.
    """
    blocks = find_unit_modules(model)
    names = [name for name, _ in model.named_parameters()]
    split = SplitModel(model, plan, MeshPeers(mesh.tp), keep=_keep, blocks=blocks)
    # Every rank makes every group; other pipeline stages may share other numbers of heads.
    sizes = set().union(*collectives.all_gather_object(mesh.world, sharing_of(split.kept)))
    neighbours = {size: mesh.neighbours(size, "tp") or mesh.tp for size in sorted(sizes)}
    equal = Combination(mesh.tp, "mean", at_end=True)  # replicas stay equal whatever a kernel does
    parts = Combination(mesh.tp, "sum", at_end=True)
    shared = {size: Combination(axis, "sum", at_end=True) for size, axis in neighbours.items()}
    copies: dict[str, Sequence[Combination]] = {}
    for name in names:
        if name not in split.kept:
            copies[name] = (parts if name in split.summed else equal,)
        elif split.kept[name].sharing > 1:
            copies[name] = (shared[split.kept[name].sharing],)
    for module in model.modules():
        if hasattr(type(module), "num_parameters"):
            replace_method(module, "num_parameters", _num_parameters)
    return TensorSplit(split, SlicedShare(copies, split.compute_with_whole))


def _keep(param: nn.Parameter, held: TensorSlice) -> None:
    if is_packed(param):
        raise ModelError(
            "tensor_parallel.autotp_size above 1 is not available for a base in 4 bits: its blocks run along the rows that "
            "would be cut. Load the base without quantization_config, or use ZeRO-3 (QLoRA)."
        )
    keep_slice(param, held, "tp")


def _num_parameters(model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """transformers' count, of the whole model."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} if exclude_embeddings else set()
    counted = (p for p in model.parameters() if id(p) not in tables and (p.requires_grad or not only_trainable))
    return sum(held_slice(p).whole_numel for p in counted)
