"""Checks keys together: contradictions, keys disabled by other keys, and values read as another type."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hf_dist.config.batch import MICRO, NO_MULTIPLE, STEPS, TRAIN
from hf_dist.config.curriculum import check_curriculum
from hf_dist.config.findings import Findings
from hf_dist.config.refusals import refused
from hf_dist.config.roles import roles_of
from hf_dist.config.schema import DistConfig
from hf_dist.config.values import is_auto, shown

_ZERO = "zero_optimization"
_OPTIMIZER = f"{_ZERO}.offload_optimizer"
_PARAM = f"{_ZERO}.offload_param"


@dataclass(frozen=True)
class Needs:
    """Keys that have an effect only under a condition."""

    keys: tuple[str, ...]
    """JSON paths; a section stands for everything in it."""
    holds: Callable[[DistConfig], bool]
    reason: str
    """A few words for the log, used if the condition does not hold."""


def _on_disk(config: DistConfig) -> bool:
    zero = config.zero_optimization
    return "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)


def _gradients(config: DistConfig) -> bool:
    asked = config.hf_dist.wires.gradients
    return asked != "powersgd" and (asked is not None or config.zero_optimization.zero_quantized_gradients)


def _reductions(config: DistConfig) -> bool:
    return _gradients(config) or config.hf_dist.wires.copies is not None


_NEEDS = (
    Needs(
        (_PARAM,),
        lambda config: (
            config.zero_optimization.stage not in (1, 2)
            or config.zero_optimization.offload_param.device == "none"
            or config.zero_optimization.offload_optimizer.device != "none"
        ),
        'read at stage 3 only; did you mean "offload_optimizer"?',
    ),
    Needs(
        tuple(
            f"{_ZERO}.{key}"
            for key in (
                *("stage3_prefetch_bucket_size", "zero_hpz_partition_size", "leaf_module"),
                "offload_param",
            )
        ),
        lambda config: config.zero_optimization.stage == 3,
        "read at stage 3 only",
    ),
    Needs(
        (f"{_ZERO}.mics_shard_size",),
        lambda config: (
            config.zero_optimization.stage == 3
            or config.local_sgd.enabled
            or (config.zero_optimization.stage > 0 and config.hf_dist.optimizer_over == "all")
        ),
        "read at stage 3 only",
    ),
    Needs(
        ("tensor_parallel.tp_overlap_comm",),
        lambda config: not config.hf_dist.fp8.enabled,
        "products in float8 compute both gradients at once",
    ),
    Needs(("hf_dist.fp8",), lambda config: config.hf_dist.fp8.enabled, "its enabled is false"),
    Needs(
        ("hf_dist.wires.weights", f"{_ZERO}.zero_quantized_weights"),
        lambda config: config.zero_optimization.stage > 0,
        "no weights are gathered at stage 0",
    ),
    Needs(
        ("hf_dist.wires.frozen_weights", f"{_ZERO}.zero_quantized_nontrainable_weights"),
        lambda config: config.zero_optimization.stage == 3,
        "frozen weights are gathered at stage 3 only",
    ),
    Needs(
        ("hf_dist.wires.second_copy",),
        lambda config: config.zero_optimization.stage == 3 and config.zero_optimization.zero_hpz_partition_size > 1,
        f"without {_ZERO}.zero_hpz_partition_size there is no second copy",
    ),
    Needs(
        ("hf_dist.wires.copies",),
        lambda config: config.zero_optimization.mics_shard_size > 0,
        f"without {_ZERO}.mics_shard_size there is one copy",
    ),
    Needs(
        ("hf_dist.wires.powersgd",),
        lambda config: config.hf_dist.wires.gradients == "powersgd",
        'hf_dist.wires.gradients is not "powersgd"',
    ),
    Needs(("hf_dist.wires.meetings",), lambda config: config.local_sgd.every > 0, "local_sgd.every is 0"),
    Needs(("hf_dist.wires.stages",), lambda config: config.pipeline.stages > 1, "the model is one pipeline stage"),
    Needs(
        ("hf_dist.wires.error_feedback",),
        lambda config: _reductions(config) or (config.hf_dist.wires.meetings is not None),
        "no reduction is encoded",
    ),
    Needs(("hf_dist.wires.machine",), lambda config: _gradients(config), "gradients are not encoded"),
    Needs(
        ("hf_dist.optimizer_over",),
        lambda config: config.zero_optimization.mics_shard_size > 0,
        f"without {_ZERO}.mics_shard_size there is one copy, over which the optimizer is sharded",
    ),
    Needs(
        tuple(
            f"local_sgd.{key}"
            for key in ("mode", "outer_lr", "outer_momentum", "nesterov", "fragments", "overlap", "mix")
        ),
        lambda config: config.local_sgd.every > 0,
        "local_sgd.every is 0",
    ),
    Needs(("local_sgd.dynamic_steps",), lambda config: config.local_sgd.is_served, 'read with "mode": "server" only'),
    Needs(("local_sgd.mix",), lambda config: config.local_sgd.streams, 'read with "fragments" or "overlap" only'),
    Needs(("local_sgd.nesterov",), lambda config: config.local_sgd.outer_momentum > 0, "outer_momentum is 0"),
    Needs(("hf_dist.memory_budget",), lambda config: config.zero_optimization.stage == 3, "read at stage 3 only"),
    Needs(
        ("hf_dist.profile.ranks", "hf_dist.profile.output_path"),
        lambda config: config.hf_dist.profile.steps is not None,
        "hf_dist.profile.steps says which steps, e.g. [10, 12]",
    ),
    Needs(
        ("hf_dist.reduce_once_per_window",),
        lambda config: config.zero_optimization.stage >= 2,
        "stages 0 and 1 always do so",
    ),
    Needs(
        ("hf_dist.memory_budget",),
        lambda config: config.pipeline.stages == 1 or config.pipeline.schedule != "zb_h1",
        'the schedule "zb_h1" needs all weights over the window',
    ),
    Needs((_PARAM,), lambda config: config.zero_optimization.offload_param.device != "none", "weights stay here"),
    Needs(
        (_OPTIMIZER,),
        lambda config: config.zero_optimization.offload_optimizer.device != "none",
        "optimizer state is not offloaded",
    ),
    Needs(
        tuple(f"{_PARAM}.{key}" for key in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")),
        lambda config: config.zero_optimization.offload_param.device == "nvme",
        'read for device "nvme" only',
    ),
    Needs(
        tuple(f"{_OPTIMIZER}.{key}" for key in ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write")),
        lambda config: config.zero_optimization.offload_optimizer.device == "nvme",
        'read for device "nvme" only',
    ),
    Needs(("aio",), _on_disk, 'read for device "nvme" only'),
    Needs(
        tuple(
            f"pipeline.{key}"
            for key in ("stages", "partition_method", "schedule", "virtual_stages", "reshard_per_microbatch")
        ),
        lambda config: config.pipeline.stages > 1,
        "the model is one pipeline stage",
    ),
    Needs(
        ("expert_parallel.autoep_size",),
        lambda config: config.expert_parallel.enabled,
        "expert_parallel.enabled is false",
    ),
    Needs(
        ("tensor_parallel",), lambda config: config.tensor_parallel.autotp_size > 1, "no matrix is cut between ranks"
    ),
    Needs(
        ("hf_dist.sequence_regions",),
        lambda config: config.tensor_parallel.autotp_size > 1,
        "no matrix is cut between ranks",
    ),
    Needs(("compile.backend",), lambda config: config.compile.enabled, "compile.enabled is false"),
    Needs(
        ("pipeline.schedule",),
        lambda config: config.pipeline.schedule != "interleaved_1f1b" or config.pipeline.virtual_stages > 1,
        'with "virtual_stages" 1 it is "1f1b"',
    ),
    Needs(
        ("pipeline.reshard_per_microbatch",),
        lambda config: config.zero_optimization.stage > 1,
        "read at stages 2 and 3 only",
    ),
    Needs(
        tuple(f"fp16.{key}" for key in ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")),
        lambda config: config.fp16.loss_scale == 0,
        "the loss scale is fixed",
    ),
)
_SWITCHES = frozenset(
    {f"{_ZERO}.stage", f"{_PARAM}.device", f"{_OPTIMIZER}.device", "pipeline.stages", "tensor_parallel.autotp_size"}
)
"""Keys that disable others. If one of these is wrong, its meaning for the others is unknown."""
_SAY_NOTHING = frozenset(
    {
        *(f"{_PARAM}.device", f"{_OPTIMIZER}.device", f"{_ZERO}.mics_shard_size"),
        *("pipeline.stages", "pipeline.reshard_per_microbatch", "tensor_parallel.autotp_size", "local_sgd.nesterov"),
    }
)
"""Keys whose value "none", 1, -1 or false requests nothing, or is what disables the rest."""


def check_together(config: DistConfig, sources: Mapping[str, str], findings: Findings) -> None:
    """Record contradictions, and keys of the file that another key disables."""
    idle = set()
    wrong = {problem.path for problem in findings.problems}
    for needs in _NEEDS:
        if not needs.holds(config) and not wrong & _SWITCHES:
            for path in sources:
                below = any(path == key or path.startswith(f"{key}.") for key in needs.keys)
                if below and path not in idle and not _asks_nothing(config, path):
                    findings.note(path, needs.reason)
                    idle.add(path)
    _check_batch(config, sources, findings)
    check_curriculum(config.curriculum_learning, findings)
    _check_warm_up(config, findings)
    for row, clause in refused(config):
        if row.other not in wrong:  # a wrong value at `other` leaves the row undecided
            findings.problem(row.path, clause, row.remedy(config), found=config.value_at(row.path))
    _check_shard_groups(config, findings)
    _check_offload(config, findings, wrong)
    _check_partition(config, findings)
    _check_intervals(config, findings)
    _check_server(config, findings)


def _asks_nothing(config: DistConfig, path: str) -> bool:
    return path in _SAY_NOTHING and config.value_at(path) == _DEFAULTS.value_at(path)


def _check_batch(config: DistConfig, sources: Mapping[str, str], findings: Findings) -> None:
    """Record sizes that fit no number of ranks. `auto.py` checks sizes against the actual number of ranks."""
    sizes = {path: config.value_at(path) for path in (TRAIN, MICRO, STEPS)}
    if config.elasticity.enabled:
        largest = config.elasticity.max_train_batch_size
        if max(config.elasticity.micro_batch_sizes) > largest:
            expected = f'has sizes above "max_train_batch_size" {largest}'
            found = list(config.elasticity.micro_batch_sizes)
            findings.problem("elasticity.micro_batch_sizes", expected, "Write smaller ones, or remove the key.", found)
        for path, size in sizes.items():
            if sources.get(path) == "file" and not config.elasticity.ignore_non_elastic_batch_info:
                fix = 'Remove the key, or set "elasticity.ignore_non_elastic_batch_info" to true.'
                findings.problem(path, 'contradicts "elasticity", which decides the batch sizes', fix, found=size)
            elif sources.get(path) == "file":
                findings.note(path, '"elasticity" decides the batch sizes')
        return
    train = sizes[TRAIN]
    factors = {path: size for path, size in sizes.items() if path != TRAIN and isinstance(size, int)}
    product = math.prod(factors.values())
    if isinstance(train, int) and train % product:
        what = " x ".join(f"{path} ({size})" for path, size in factors.items())
        fix = (
            f"Set it to {max(1, round(train / product)) * product} or another multiple of {product}, or remove the key."
        )
        findings.problem(TRAIN, f"{NO_MULTIPLE} {what}", fix, found=train)


def _check_warm_up(config: DistConfig, findings: Findings) -> None:
    params = config.scheduler.params if config.scheduler is not None else {}
    warm_up, total = params.get("warmup_num_steps"), params.get("total_num_steps")
    if isinstance(warm_up, int) and isinstance(total, int) and warm_up > total:
        expected = f'is longer than the whole schedule, "total_num_steps" {total}'
        fix = f'Set it to {total} or less, or "total_num_steps" to "auto".'
        findings.problem("scheduler.params.warmup_num_steps", expected, fix, found=warm_up)


def _check_shard_groups(config: DistConfig, findings: Findings) -> None:
    if config.zero_optimization.mics_shard_size == 0:
        findings.problem(f"{_ZERO}.mics_shard_size", "is not -1 (off) or at least 1", "Remove the key.", found=0)


def _check_offload(config: DistConfig, findings: Findings, wrong: set[str]) -> None:
    zero = config.zero_optimization
    for path, section in ((_OPTIMIZER, zero.offload_optimizer), (_PARAM, zero.offload_param)):
        if section.device == "nvme" and not section.nvme_path and f"{path}.nvme_path" not in wrong:
            findings.problem(f"{path}.nvme_path", 'is missing; device "nvme" needs a folder', 'Add "nvme_path": "...".')


def _check_partition(config: DistConfig, findings: Findings) -> None:
    pipeline = config.pipeline
    parts = pipeline.stages * pipeline.virtual_stages
    if isinstance(pipeline.partition_method, tuple) and pipeline.stages > 1 and len(pipeline.partition_method) != parts:
        expected = f"has {len(pipeline.partition_method)} numbers, not one for each of the {parts} parts"
        found = list(pipeline.partition_method)
        findings.problem(
            "pipeline.partition_method", expected, "Write the blocks of every part, or remove the key.", found=found
        )


def _check_server(config: DistConfig, findings: Findings) -> None:
    """What `local_sgd` with a server needs, and what it does not do."""
    section, roles = config.local_sgd, roles_of(config.hf_dist.roles)
    servers = [name for name, role in roles.items() if role.averages]
    copies = next((role.replicas for role in roles.values() if role.asks), 1)
    if not section.is_served:
        for name in servers:
            expected = 'has nothing to average: local_sgd.mode is not "server"'
            fix = 'Add "local_sgd": {"mode": "server", "every": 50}, or remove the role.'
            findings.problem(f"hf_dist.roles.{name}.averages", expected, fix, found=True)
        if copies > 1 and not servers:
            fix = 'Add a role with "averages": true, and "local_sgd": {"mode": "server", "every": 50}.'
            findings.problem("hf_dist.roles", "has replicas, and no role that averages them", fix, found=copies)
        return
    if not servers:
        example = '{"server": {"ranks": 1, "averages": true}, "trainer": {"ranks": "rest", "replicas": 2}}'
        fix = f'Add "hf_dist": {{"roles": {example}}}.'
        findings.problem("local_sgd.mode", "needs a role that averages", fix, found="server")
    if section.outer_momentum and not section.nesterov:
        expected = "needs Nesterov's momentum with a server: it is the one that may be delayed (arXiv 2401.09135)"
        findings.problem("local_sgd.outer_momentum", expected, 'Add "nesterov": true.', found=section.outer_momentum)
    for key, found in (("fragments", section.fragments > 1), ("overlap", section.overlap), ("mix", section.mix)):
        if found:
            expected = "is not available with a server: a replica sends all of its movement, and waits"
            findings.problem(f"local_sgd.{key}", expected, "Remove the key.", found=getattr(section, key))


def _check_intervals(config: DistConfig, findings: Findings) -> None:
    section = config.local_sgd
    if section.enabled and section.overlap >= section.every:
        expected = f'is not below "every" {section.every}: a fragment would start again before its mean is applied'
        fix = f"Set it to {section.every - 1} or less, or remove the key."
        findings.problem("local_sgd.overlap", expected, fix, found=section.overlap)
    here, there = config.activation_checkpointing.every_n_layers, config.pipeline.activation_checkpoint_interval
    if here and there and here != there:
        expected = f'contradicts "activation_checkpoint_interval" {there} of the pipeline section'
        findings.problem("activation_checkpointing.every_n_layers", expected, "Keep one of the two.", found=here)


def note_coercions(written: Mapping[str, object], config: DistConfig, findings: Findings) -> None:
    """Record every value that was written as another type than it is read as, such as "5e8", "true", 15099494.4."""
    for path, value in _leaves(written, ""):
        read = config.value_at(path)
        if is_auto(value) or path.startswith(("optimizer.", "scheduler.")):
            continue
        is_text = isinstance(value, str) and not isinstance(read, str)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and isinstance(read, (int, float))
        if (is_text and isinstance(read, (int, float))) or (is_number and (isinstance(read, bool) or value != read)):
            findings.note(path, f"{shown(value)} is read as {shown(read)}", "read")


def _leaves(node: Mapping[str, object], path: str) -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from _leaves(value, where)
        else:
            yield where, value


_DEFAULTS = DistConfig()
