"""Tensor parallelism on sharded weights: cuts a model along `tp` and says how gradients of uncut parameters are combined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hf_dist.config import DistConfig, settled
from hf_dist.dist import collectives
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.errors import ConfigError, ModelError
from hf_dist.parallel.experts.spread import find_experts
from hf_dist.parallel.tensor.choose import choose_plan
from hf_dist.parallel.tensor.peers import MeshPeers
from hf_dist.parallel.tensor.plan import SplitPlan, unwrapped
from hf_dist.parallel.tensor.slices import refuse_narrow_experts, sharing_of
from hf_dist.parallel.tensor.split import SplitModel
from hf_dist.sharding.group_axes import Combination, Operation
from hf_dist.sharding.param_slice import keep_slice
from hf_dist.sharding.quantised import is_packed
from hf_dist.sharding.sliced_share import SlicedShare
from hf_dist.sharding.units import find_unit_modules
from hf_dist.tensors.tensor_slice import TensorSlice

__all__ = ["TensorSplit", "keep_along_tp", "kinds_of_copies", "plan_of", "plan_tensors", "split_tensors"]


@dataclass(frozen=True)
class TensorSplit:
    """A model cut along `tp`, with this rank's slices."""

    model: SplitModel
    share: SlicedShare
    """The part that the sharded groups need."""

    def describe(self) -> list[str]:
        """Lines for the start-up report."""
        return [self.model.describe()]


def plan_tensors(model: nn.Module, config: DistConfig, mesh: ParallelMesh, in_place: bool = False) -> SplitPlan:
    """Plan which parameters of `model` are cut along `tp` and where activations are exchanged; rank 0 plans for all ranks.

    `in_place`: as in `plan_of`. Collective over world. Raises `ModelError` on every rank if the model cannot be cut, or not
    into this many slices.
    """
    _refuse_packed(model)
    found: SplitPlan | str | None = None
    if mesh.world.rank == 0:
        try:
            spread = mesh.axes.size("ep") > 1
            found = plan_of(model, config, mesh.tp.size, spread=spread, in_place=in_place)
        except (ModelError, ConfigError) as error:
            found = str(error)
    found = collectives.broadcast_object(mesh.world, found)
    if isinstance(found, str):
        raise ModelError(found)
    assert found is not None
    return found


def plan_of(
    model: nn.Module, config: DistConfig, size: int, *, spread: bool = False, in_place: bool = False
) -> SplitPlan:
    """Plan which parameters of `model` (real or on meta) are cut between `size` ranks. Local; takes seconds.

    `spread`: its experts are spread over ranks and stay whole; `in_place`: it is also cut into stages, which copy what arrives
    into stand-ins that are as long as whole sequences (`StagePlan.in_place`). Raises `ModelError`.
    """
    base, given = unwrapped(model)[0], config.tensor_parallel.partition_config
    sequence = settled(config.hf_dist.sequence_regions)
    if in_place and sequence:
        raise ModelError(
            f"hf_dist.sequence_regions: true is not available for {type(base).__name__} together with pipeline.stages above 1: "
            "code between its blocks reads whole sequences of an earlier stage. Remove the key."
        )
    sequence = False if in_place else sequence
    plan = choose_plan(base, size, find_unit_modules, given, sequence, find_experts if spread else None)
    refuse_narrow_experts(base, plan, size, itemsize=4 if config.dtype == "fp32" else 2)
    return plan


def split_tensors(
    model: nn.Module, plan: SplitPlan, mesh: ParallelMesh, config: DistConfig, whole: nn.Module | None = None
) -> TensorSplit:
    """Cut `model` along `tp`, in place, without reading lazy weights. Collective over world.

    `whole`: the model on meta before it was cut into stages. The sequence is cut and joined at the ends of all its blocks, not
    of those whose parameters are here. Raises `ModelError` on every rank for sizes that do not divide, before anything is cut.
    """
    blocks = {name: model.get_submodule(name) for name in find_unit_modules(model if whole is None else whole)}
    names = [name for name, _ in model.named_parameters()]
    early = config.tensor_parallel.tp_overlap_comm and not config.hf_dist.fp8.enabled
    split = SplitModel(model, plan, MeshPeers(mesh.tp), keep=keep_along_tp, blocks=blocks, overlap=early)
    # Making groups is collective over world, and other pipeline stages may share heads between other numbers of ranks.
    sizes = set().union(*collectives.all_gather_object(mesh.world, sharing_of(split.kept)))
    neighbours = {size: mesh.neighbours(size, "tp") or mesh.tp for size in sorted(sizes)}
    copies = {
        name: (Combination(neighbours[among] if among else mesh.tp, operation, at_end=True),)
        for name, (operation, among) in kinds_of_copies(split, names).items()
    }
    return TensorSplit(split, SlicedShare(copies, split.compute_with_whole))


def kinds_of_copies(split: SplitModel, names: Sequence[str]) -> dict[str, tuple[Operation, int]]:
    """Parameters that other ranks of `tp` also hold -> (how gradients are combined, over how many neighbours; 0: all)."""
    found: dict[str, tuple[Operation, int]] = {}
    for name in names:
        if name not in split.kept:  # the mean keeps copies equal even with non-deterministic kernels
            found[name] = ("sum" if name in split.summed else "mean", 0)
        elif split.kept[name].sharing > 1:
            found[name] = ("sum", split.kept[name].sharing)
    return found


def _refuse_packed(model: nn.Module) -> None:
    name = next((name for name, param in model.named_parameters() if is_packed(param)), None)
    if name is not None:
        raise ModelError(
            f"tensor_parallel.autotp_size above 1 is not available for a base in 4 bits ({name}): its blocks run along the "
            "rows that would be cut. Load the base without quantization_config, or use ZeRO-3 (QLoRA)."
        )


def keep_along_tp(param: nn.Parameter, held: TensorSlice) -> None:
    """Cut one parameter along `tp`, in place. Local."""
    keep_slice(param, held, "tp")
