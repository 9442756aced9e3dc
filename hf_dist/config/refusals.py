"""THE list of settings that cannot be combined. `hf_dist/config/README.md` shows it as a table, and a test compares the two.

Keys alone decide the rows of `REFUSALS`, when a file is read and again after arguments or "auto" have filled keys. Conflicts
that depend on the model or the script are raised where they are found; `ELSEWHERE` says where.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_dist.config.one_bit_refusals import ONE_BIT_REFUSALS
from hf_dist.config.refusal import Elsewhere, Refusal
from hf_dist.config.schema import DistConfig
from hf_dist.config.values import shown
from hf_dist.errors import ConfigError, Problem

__all__ = ["ELSEWHERE", "REFUSALS", "Elsewhere", "Refusal", "refuse", "refused", "table"]

_ZERO = "zero_optimization"
_HPZ = f"{_ZERO}.zero_hpz_partition_size"
_OFFLOAD = f"{_ZERO}.offload_optimizer.device"
_EARLY = "hf_dist.optimizer_in_backward"
_OVER = "hf_dist.optimizer_over"
_TP = "tensor_parallel.autotp_size"


def _in_stages(config: DistConfig) -> bool:
    return config.pipeline.stages > 1


def _in_slices(config: DistConfig) -> bool:
    return config.tensor_parallel.autotp_size > 1


def _early(config: DistConfig) -> bool:
    return config.hf_dist.optimizer_in_backward


def _zero(stage: int, **more: object) -> dict[str, Any]:
    return {_ZERO: {"stage": stage, **more}}


_STAGES = {"pipeline": {"stages": 2}}
_SLICES = {"tensor_parallel": {"autotp_size": 2}}
_SPREAD = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
_IN_BACKWARD = {"hf_dist": {"optimizer_in_backward": True}}
_SERVED: dict[str, Any] = {
    "local_sgd": {"every": 2, "mode": "server"},
    "hf_dist": {"roles": {"server": {"ranks": 1, "averages": True}, "trainer": {"ranks": "rest", "replicas": 2}}},
}
_OTHER = f'or set "{_EARLY}" to false.'

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "compile.enabled",
        "`pipeline.stages` above 1",
        lambda config: config.compile.enabled and _in_stages(config),
        "not built",
        "is not available together with pipeline.stages above 1",
        "Set it to false, or remove pipeline.stages.",
        {"compile": {"enabled": True}},
        _STAGES,
    ),
    Refusal(
        "compile.enabled",
        "`tensor_parallel.autotp_size` above 1",
        lambda config: config.compile.enabled and _in_slices(config),
        "not built",
        f"is not available together with {_TP} above 1",
        f"Set it to false, or remove {_TP}.",
        {"compile": {"enabled": True}},
        _SLICES,
    ),
    Refusal(
        "progressive_layer_drop.enabled",
        "`pipeline.stages` above 1",
        lambda config: config.progressive_layer_drop.enabled and _in_stages(config),
        "not built",
        'is not available together with "pipeline.stages" above 1',
        "Set it to false.",
        {"progressive_layer_drop": {"enabled": True}},
        _STAGES,
    ),
    Refusal(
        "hf_dist.fp8.enabled",
        "`fp16.enabled`",
        lambda config: config.hf_dist.fp8.enabled and config.fp16.enabled is True,
        "torchao's products are in bf16 beside float8",
        "is not available together with fp16: products in float8 come out in bf16",
        'Set "bf16": {"enabled": true} instead of fp16, or remove hf_dist.fp8.',
        {"hf_dist": {"fp8": {"enabled": True}}},
        {"fp16": {"enabled": True}},
    ),
    Refusal(
        "hf_dist.wires.error_feedback",
        "`elasticity.enabled`",
        lambda config: config.hf_dist.wires.error_feedback and config.elasticity.enabled,
        "what a message left out belongs to a rank, and another number of ranks loses it",
        "is not available together with elasticity.enabled: what a message left out belongs to a rank",
        "Set it to false, or remove the elasticity section.",
        {"hf_dist": {"wires": {"gradients": "int4", "error_feedback": True}}},
        {"elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]}},
    ),
    Refusal(
        "hf_dist.wires.gradients",
        '"powersgd", with `zero_optimization.stage` above 0',
        lambda config: config.hf_dist.wires.gradients == "powersgd" and config.zero_optimization.stage > 0,
        "its factors are of whole matrices, and a rank reduces a part of them",
        '"powersgd" needs whole matrices on every rank, and zero_optimization.stage is {other}',
        'Set it to "int8" or "int4", or set zero_optimization.stage to 0.',
        {"hf_dist": {"wires": {"gradients": "powersgd"}}},
        _zero(2),
        f"{_ZERO}.stage",
    ),
    Refusal(
        "hf_dist.wires.meetings",
        '`local_sgd.mode` "server"',
        lambda config: config.hf_dist.wires.meetings is not None and config.local_sgd.is_served,
        "not built",
        'is not available together with local_sgd.mode "server"',
        'Remove it, or set local_sgd.mode to "synchronous".',
        {"hf_dist": {"wires": {"meetings": "int8"}}},
        _SERVED,
    ),
    Refusal(
        "pipeline.reshard_per_microbatch",
        '`pipeline.schedule` "zb_h1" at stage 3',
        lambda config: (
            _in_stages(config)
            and config.pipeline.reshard_per_microbatch
            and config.pipeline.schedule == "zb_h1"
            and config.zero_optimization.stage == 3
        ),
        "it needs the weights of a microbatch again after its backward",
        'contradicts "schedule": "zb_h1", which needs the weights of a microbatch again after its backward',
        'Remove the key, or set "schedule" to "1f1b".',
        {**_zero(3), "pipeline": {"stages": 2, "reshard_per_microbatch": True}},
        {**_zero(3), "pipeline": {"stages": 2, "schedule": "zb_h1"}},
    ),
    Refusal(
        "pipeline.virtual_stages",
        '`pipeline.schedule` other than "interleaved_1f1b"',
        lambda config: (
            _in_stages(config) and config.pipeline.virtual_stages > 1 and config.pipeline.schedule != "interleaved_1f1b"
        ),
        "the others run one stage per rank",
        'needs "schedule": "interleaved_1f1b"; "{other}" runs one stage per rank',
        'Set "schedule" to "interleaved_1f1b", or remove the key.',
        {"pipeline": {"stages": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}},
        {"pipeline": {"stages": 2, "schedule": "1f1b"}},
        "pipeline.schedule",
    ),
    Refusal(
        _HPZ,
        "`expert_parallel.enabled`",
        lambda config: _has_second_copy(config) and config.expert_parallel.enabled,
        "not built",
        'is not available together with "expert_parallel"',
        "Remove the key.",
        _zero(3, zero_hpz_partition_size=2),
        {**_zero(3), **_SPREAD},
    ),
    Refusal(
        _HPZ,
        "`zero_optimization.mics_shard_size` of another size",
        lambda config: (
            0 < config.zero_optimization.mics_shard_size != config.zero_optimization.zero_hpz_partition_size > 1
        ),
        "its groups keep all states already",
        'contradicts "mics_shard_size" {other}, which keeps all states within its groups',
        "Keep one of the two.",
        _zero(3, zero_hpz_partition_size=4),
        _zero(3, mics_shard_size=2),
        f"{_ZERO}.mics_shard_size",
    ),
    Refusal(
        _OVER,
        "`zero_optimization.stage` 0",
        lambda config: config.hf_dist.optimizer_over == "all" and config.zero_optimization.stage == 0,
        "every rank steps all of it",
        'is "all", which needs optimizer state that is sharded: at stage 0 every rank has all of it',
        f'Set "{_ZERO}.stage" to 1, 2 or 3, or remove the key.',
        {**_zero(1, mics_shard_size=2), "hf_dist": {"optimizer_over": "all"}},
        _zero(0),
        f"{_ZERO}.stage",
    ),
    Refusal(
        _OVER,
        "`local_sgd.every`",
        lambda config: config.hf_dist.optimizer_over == "all" and config.local_sgd.every > 0,
        "replicas that train alone have all of their optimizer state",
        'is "all", and replicas that train alone (local_sgd) have all of their optimizer state',
        "Remove the key, or the section local_sgd.",
        {**_zero(3, mics_shard_size=2), "hf_dist": {"optimizer_over": "all"}},
        {"local_sgd": {"every": 2}},
    ),
    Refusal(
        _OVER,
        '`zero_optimization.offload_param.device` "nvme"',
        lambda config: (
            config.hf_dist.optimizer_over == "all" and config.zero_optimization.offload_param.device == "nvme"
        ),
        "not built",
        'is "all", which is not available for weights on disk',
        f'Set "{_ZERO}.offload_param.device" to "cpu" or "none", or remove the key.',
        {**_zero(3, mics_shard_size=2), "hf_dist": {"optimizer_over": "all"}},
        _zero(3, offload_param={"device": "nvme", "nvme_path": "/tmp"}),
        f"{_ZERO}.offload_param.device",
    ),
    Refusal(
        _OFFLOAD,
        "`zero_optimization.stage` 0",
        lambda config: (
            config.zero_optimization.offload_optimizer.device != "none" and config.zero_optimization.stage == 0
        ),
        "every rank would offload and step all of it",
        "needs optimizer state that is sharded: at stage 0 every rank would offload and step all of it",
        f'Set "{_ZERO}.stage" to 1, 2 or 3, or the device to "none".',
        _zero(1, offload_optimizer={"device": "cpu"}),
        _zero(0),
        f"{_ZERO}.stage",
    ),
    Refusal(
        "bf16.enabled",
        "`fp16.enabled`",
        lambda config: config.fp16.enabled is True and config.bf16.enabled is True,
        "one dtype",
        'contradicts "fp16.enabled", which is true too',
        "Set one of them to false.",
        {"bf16": {"enabled": True}},
        {"fp16": {"enabled": True}},
    ),
    Refusal(
        "gradient_clipping",
        f"`{_EARLY}`",
        lambda config: _early(config) and config.gradient_clipping not in (None, 0, "auto"),
        "clipping needs the norm of all gradients before the first is stepped",
        f"needs the norm of all gradients before the first is stepped, which {_EARLY} rules out",
        f"Set it to 0 (max_grad_norm=0 in the Trainer), {_OTHER}",
        {"gradient_clipping": 1.0},
        _IN_BACKWARD,
    ),
    Refusal(
        "torch_autocast.enabled",
        "`fp16.enabled`",
        lambda config: config.torch_autocast.enabled and config.fp16.enabled is True,
        "weights in fp16 leave nothing to cast",
        'contradicts "fp16": weights in fp16 leave autocast to bfloat16 nothing to cast',
        'Set it to false, or set "fp16.enabled" to false.',
        {"torch_autocast": {"enabled": True}},
        {"fp16": {"enabled": True}},
    ),
    Refusal(
        "bf16.bf16_master_weights_and_grads",
        "`local_sgd.every`",
        lambda config: config.bf16.bf16_master_weights_and_grads and config.local_sgd.every > 0,
        "replicas average fp32 weights",
        "is not available with local_sgd: replicas average fp32 weights",
        "Set it to false, or remove the section local_sgd.",
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {"local_sgd": {"every": 2}},
    ),
    Refusal(
        "fp16.enabled",
        f"`{_EARLY}`",
        lambda config: _early(config) and config.fp16.enabled is True,
        "a step is skipped after a check of all gradients",
        f"skips steps after a check of all gradients, which {_EARLY} rules out",
        f"Set it to false, {_OTHER}",
        {"fp16": {"enabled": True}},
        _IN_BACKWARD,
    ),
    Refusal(
        "bf16.check_grad_overflow",
        f"`{_EARLY}`",
        lambda config: (
            _early(config)
            and config.bf16.check_grad_overflow
            and config.source_of("bf16.check_grad_overflow") == "file"
        ),
        "a step is skipped after a check of all gradients",
        f"skips steps after a check of all gradients, which {_EARLY} rules out",
        f"Set it to false, {_OTHER}",
        {"bf16": {"enabled": True, "check_grad_overflow": True}},
        _IN_BACKWARD,
    ),
    *ONE_BIT_REFUSALS,
)


def _has_second_copy(config: DistConfig) -> bool:
    return config.zero_optimization.zero_hpz_partition_size > 1 and config.zero_optimization.stage == 3


_CUT = "`tensor_parallel.autotp_size` above 1"
_SEQUENCE = "`sequence_parallel_size` above 1"
_REGIONS = "`hf_dist.sequence_regions`"
_RING = "`hf_dist.sequence_parallel` with a ring"

ELSEWHERE: tuple[Elsewhere, ...] = (
    Elsewhere(
        "an optimizer that sees whole tensors",
        f"`{_EARLY}`, `{_OFFLOAD}` (Muon: on disk)",
        "optim/stepping.py",
        ", which must see ",
    ),
    Elsewhere(
        "an optimizer that sees whole tensors",
        f"{_CUT}, spread experts",
        "optim/whole_step.py",
        "needs it whole. Set",
    ),
    Elsewhere("Muon", f'`{_OVER}` "all" with spread experts', "optim/muon_step.py", "have no group of their own"),
    Elsewhere("Muon", _CUT, "optim/muon_step.py", "and its update needs the whole matrix"),
    Elsewhere("a base in 4 bits", _CUT, "parallel/tensor_on_shards.py", "is not available for a base in 4 bits"),
    Elsewhere(
        "adapters other than LoRA on a cut matrix",
        _CUT,
        "parallel/tensor/slices.py",
        "are not available on matrices that are cut",
    ),
    Elsewhere(
        "a trained copy of a cut matrix (PEFT's `modules_to_save`)",
        _CUT,
        "parallel/tensor/slices.py",
        "PEFT trains a copy of",
    ),
    Elsewhere("X-LoRA", _CUT, "parallel/tensor/slices.py", "mixes adapters of matrices that are cut"),
    Elsewhere(
        "an embedding with `max_norm`", "several data ranks", "sharding/fit.py", "writes the rows that a forward"
    ),
    Elsewhere(
        "a loss that counts boxes or masks over all processes",
        "`pipeline.stages` above 1",
        "hf/counting_losses.py",
        "counts boxes or masks over all processes",
    ),
    Elsewhere(
        "several optimizers of one model", f"`{_EARLY}`, `local_sgd`", "engine/optimizer_step.py", "takes one optimizer"
    ),
    Elsewhere(
        "adapters on stacked experts",
        f"{_CUT}, experts that are not spread",
        "parallel/tensor/slices.py",
        "whose weights are stacked, are not available where they are cut",
    ),
    Elsewhere(
        "adapters on an embedding, DoRA on a matrix cut by rows",
        _CUT,
        "parallel/tensor/slices.py",
        "or set use_dora=False",
    ),
    Elsewhere(
        "experts that are quantised",
        "`expert_parallel.enabled`",
        "parallel/experts/spread.py",
        "and a share of them cannot be taken",
    ),
    Elsewhere(
        "experts that are no stacks",
        "`expert_parallel.enabled`",
        "parallel/experts/spread.py",
        "cannot be spread over ranks",
    ),
    Elsewhere(
        "`output_hidden_states` in training",
        _REGIONS,
        "parallel/tensor/split.py",
        "output_hidden_states in training: with hf_dist.sequence_regions",
    ),
    Elsewhere(
        "reentrant checkpointing",
        _REGIONS,
        "parallel/tensor/sequence.py",
        "a block is run again and its tensors are others",
    ),
    Elsewhere(
        "a residual past a block, between pipeline stages",
        _REGIONS,
        "parallel/tensor_on_shards.py",
        "code between its blocks reads whole sequences",
    ),
    Elsewhere(
        "an encoder with a decoder",
        _RING,
        "parallel/sequence/pairs.py",
        "to an encoder of another length, which a ring cannot",
    ),
    Elsewhere(
        "an encoder with a decoder, between pipeline stages",
        _SEQUENCE,
        "parallel/sequence/split.py",
        "whose rows are not split in a pipeline",
    ),
    Elsewhere("inputs other than text", _SEQUENCE, "parallel/sequence/inputs.py", "and only text is split over ranks"),
    Elsewhere("custom masks", _SEQUENCE, "parallel/sequence/inputs.py", "masks cannot be split over ranks"),
    Elsewhere("`output_attentions`", _SEQUENCE, "parallel/sequence/inputs.py", "asks for attention over whole rows"),
    Elsewhere(
        "`output_attentions`",
        "`tensor_parallel.autotp_size` above 1",
        "parallel/tensor/split.py",
        "a rank has the weights of its heads only",
    ),
    Elsewhere(
        "arguments that nobody has tried on parts, such as `encoder_hidden_states`",
        _SEQUENCE,
        "parallel/sequence/split.py",
        "whether parts of it belong to parts of the rows is not known",
    ),
    Elsewhere("dropout of attention", _RING, "parallel/sequence/attention.py", "a ring has no dropout of attention"),
    Elsewhere(
        "a bias, a soft cap or sinks of attention", _RING, "parallel/sequence/attention.py", "which a ring cannot"
    ),
    Elsewhere(
        "TRL's trainers that generate or ask a reference model",
        "`pipeline.stages` above 1",
        "hf/trl.py",
        "its step generates, or asks a reference model",
    ),
    Elsewhere(
        "`loss.backward()` in the script",
        "`pipeline.stages` above 1",
        "engine/pipeline_runner.py",
        "backward is part of the schedule",
    ),
    Elsewhere(
        "`create_graph=True`",
        "ZeRO stage 3, slices, parts of sequences, spread experts",
        "sharding/hooks.py",
        "what ranks of a split layer send each other",
    ),
    Elsewhere(
        "`dispatch_batches`",
        "stages, slices or parts of sequences",
        "hf/data.py",
        "one process would send batches to all others",
    ),
)


def refused(config: DistConfig) -> Iterator[tuple[Refusal, str]]:
    """Rows that apply to `config`, each with its message clause."""
    for row in REFUSALS:
        if row.both(config):
            yield row, row.expected.format(other=config.value_at(row.other))


def refuse(config: DistConfig) -> None:
    """Raise one `ConfigError` with all rows that apply. Local; every rank has the same config.

    A value that an argument of the script gave is named as that argument: nobody has written the key.
    """
    problems = []
    for row, clause in refused(config):
        _, is_given, giver = config.source_of(row.path).partition(" <- ")
        name, line = (giver, "") if is_given else (config.spelled(row.path), config.at_line(row.path))
        problems.append(Problem(name, shown(config.value_at(row.path)), clause, row.remedy(config), line))
    if problems:
        raise ConfigError(problems)


def table() -> list[str]:
    """Both lists as Markdown tables."""
    keys = [f"| `{row.path}` | {row.beside} | {row.why} |" for row in REFUSALS]
    found = [f"| {row.setting} | {row.beside} | `{row.file}` |" for row in ELSEWHERE]
    return [
        *("| refused key | together with | why |", "|---|---|---|", *keys, ""),
        *("| in the model or the script | together with | raised in |", "|---|---|---|", *found),
    ]
