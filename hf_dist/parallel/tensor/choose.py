"""Chooses the plan by which a model is split: its author's plan, completed by derivation; each is verified before use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from torch import nn

from hf_dist.errors import ModelError
from hf_dist.parallel.tensor.derive import completed
from hf_dist.parallel.tensor.partition import plan_of_config
from hf_dist.parallel.tensor.plan import SplitPlan, plan_of_model, with_whole_experts
from hf_dist.parallel.tensor.verify import Unsplit, unsplit, verified

__all__ = ["choose_plan"]

Experts = Callable[[nn.Module], Iterable[str]]

_known: dict[object, SplitPlan | str] = {}
"""Results in this process: a plan, or the reason why there is none."""


def choose_plan(
    model: nn.Module,
    size: int,
    blocks: Callable[[nn.Module], Mapping[str, nn.Module]],
    given: Mapping[str, object] | None = None,
    sequence: bool | None = None,
    apart: Experts | None = None,
) -> SplitPlan:
    """A plan for `model` (without adapters) on `size` ranks that computes the same as one process. Local, on the CPU: seconds.

    `blocks`: the repeated parts of a model, by path; `given`: a `partition_config`, which replaces both other sources;
    `sequence`: whether to keep parts of the sequence between regions, None if that verifies; `apart`: the paths of experts
    in a model, which are not split. Reads no weights of `model`, only its class and config. Raises `ModelError` if no plan
    verifies.
    """
    config: object = getattr(model, "config", None)
    key = (
        type(model),
        size,
        repr(config.to_dict()) if hasattr(config, "to_dict") else id(model),
        repr(given),
        sequence,
        apart is None,
    )
    if key not in _known:
        try:
            reference = unsplit(model, size)
            plan = _chosen(reference, size, blocks, given, apart)
            _known[key] = plan if sequence is False else _with_sequence(plan, reference, size, blocks, sequence)
        except ModelError as error:
            _known[key] = str(error)
    found = _known[key]
    if isinstance(found, str):
        raise ModelError(found)
    return found


def _chosen(
    reference: Unsplit,
    size: int,
    blocks: Callable[[nn.Module], Mapping[str, nn.Module]],
    given: Mapping[str, object] | None,
    apart: Experts | None,
) -> SplitPlan:
    experts = list(apart(reference.model)) if apart is not None else []

    def verify(plan: SplitPlan) -> SplitPlan:
        return verified(plan, reference, size, blocks)

    if given is not None:
        return verify(with_whole_experts(plan_of_config(reference.model, given), experts))
    name = type(reference.model).__name__
    plan, problem = with_whole_experts(plan_of_model(reference.model), experts), ""
    if plan.params:
        try:
            plan = verify(plan)
        except Exception as error:  # including errors of the model's own code
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
            plan = SplitPlan()
    if not plan.params:
        plan = with_whole_experts(SplitPlan(source="derived"), experts)
    plan = completed(plan, reference, blocks(reference.model), verify)
    if not plan.params:
        reason = f"its own plan is not right: {problem}" if problem else "it has no plan (tp_plan)"
        raise ModelError(
            f"tensor_parallel.autotp_size {size}: {name} cannot be split. {reason[0].upper()}{reason[1:]}, and none could be "
            "derived that computes what one process does. Use ZeRO-3 or pipeline.stages, which need none."
        )
    return plan


def _with_sequence(
    plan: SplitPlan,
    reference: Unsplit,
    size: int,
    blocks: Callable[[nn.Module], Mapping[str, nn.Module]],
    wanted: bool | None,
) -> SplitPlan:
    try:
        return verified(replace(plan, sequence=True), reference, size, blocks)
    except Exception as error:  # including errors of the model's own code
        if not wanted:
            return plan
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"hf_dist.sequence_regions: {type(reference.model).__name__} cannot keep parts of the sequence between its "
            f"regions: {text}. Remove the key."
        ) from error
