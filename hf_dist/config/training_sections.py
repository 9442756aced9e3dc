"""Sections about training around the model: batches for any number of ranks, growing lengths, a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PlainValidator

from hf_dist.config import values
from hf_dist.config.sections import Count, Flag, Frozen, Real, Share, Text, Whole

NeededCount = Annotated[int, PlainValidator(values.needed(values.whole(1)))]
Counts = Annotated[tuple[int, ...], PlainValidator(values.needed(values.as_tuple(values.wholes(1))))]
Growth = Annotated[
    Literal["fixed_linear", "fixed_root", "fixed_discrete"],
    PlainValidator(values.choice("fixed_linear", "fixed_root", "fixed_discrete")),
]
LocalMode = Annotated[Literal["synchronous", "server"], PlainValidator(values.choice("synchronous", "server"))]
BelowOne = Annotated[float, PlainValidator(values.real(below=1.0))]
FromMinusOne = Annotated[int, PlainValidator(values.whole(-1))]


class ElasticityConfig(Frozen):
    """The `elasticity` section: one global batch that many numbers of ranks can divide."""

    enabled: Flag = False
    """`elasticity.enabled`: whether this section decides the batch sizes, including the script's arguments."""
    max_train_batch_size: Count = 2000
    """`elasticity.max_train_batch_size`: largest number of samples per optimizer step."""
    micro_batch_sizes: Counts = (2, 4, 6)
    """`elasticity.micro_batch_sizes`: samples per rank and forward, to choose from."""
    min_gpus: Count = 1
    """`elasticity.min_gpus`: fewest data ranks that the choice considers."""
    max_gpus: Count = 10_000
    """`elasticity.max_gpus`: most data ranks that the choice considers."""
    prefer_larger_batch: Flag = True
    """`elasticity.prefer_larger_batch`: whether to take the larger of two global batches that fit as many numbers of ranks."""
    ignore_non_elastic_batch_info: Flag = False
    """`elasticity.ignore_non_elastic_batch_info`: whether to ignore batch sizes elsewhere in the file."""


class LocalSgdConfig(Frozen):
    """The `local_sgd` section: replicas of the sharded states train alone and meet every so many steps."""

    mode: LocalMode = "synchronous"
    """`local_sgd.mode`: "synchronous": replicas meet each other; "server": each meets a role that averages, at its own pace."""
    every: Whole = 0
    """`local_sgd.every`: optimizer steps from one meeting of the replicas to the next; 0 is off."""
    outer_lr: Real = 1.0
    """`local_sgd.outer_lr`: learning rate of the outer SGD; its gradient is the average movement of the replicas."""
    outer_momentum: BelowOne = 0.0
    """`local_sgd.outer_momentum`: momentum of the outer SGD; 0 with `outer_lr` 1 averages the weights and needs no state."""
    nesterov: Flag = False
    """`local_sgd.nesterov`: whether the outer momentum is Nesterov's."""
    fragments: Count = 1
    """`local_sgd.fragments`: parts of the model that meet in turn, spread over the steps of `every`; 1 means all at once."""
    overlap: Whole = 0
    """`local_sgd.overlap`: optimizer steps for which an averaging may overlap training before its result is applied."""
    mix: BelowOne = 0.0
    """`local_sgd.mix`: share of its own weights that a replica keeps when a fragment's mean is applied."""
    dynamic_steps: Flag = True
    """`local_sgd.dynamic_steps`: whether slower replicas make fewer steps than `every` between two meetings with a server."""

    @property
    def enabled(self) -> bool:
        """Whether replicas within this job train alone, and meet each other."""
        return self.every > 0 and self.mode == "synchronous"

    @property
    def is_served(self) -> bool:
        """Whether this job is one replica, which meets a server."""
        return self.every > 0 and self.mode == "server"

    @property
    def streams(self) -> bool:
        """Whether fragments meet in turn or averaging overlaps training. Otherwise training waits and all parts meet."""
        return self.enabled and (self.fragments > 1 or self.overlap > 0)


class CurriculumSchedule(Frozen):
    """The `curriculum_learning.schedule_config` section: how the length grows."""

    total_curriculum_step: NeededCount | None = None
    """`curriculum_learning.schedule_config.total_curriculum_step`: optimizer steps until the full length."""
    difficulty_step: NeededCount | None = None
    """`curriculum_learning.schedule_config.difficulty_step`: tokens; lengths are multiples of it."""
    root_degree: NeededCount | None = None
    """`curriculum_learning.schedule_config.root_degree`: for "fixed_root": 2 grows with the square root of the step."""
    difficulty: Counts | None = None
    """`curriculum_learning.schedule_config.difficulty`: for "fixed_discrete": the lengths, in order."""
    max_step: Counts | None = None
    """`curriculum_learning.schedule_config.max_step`: for "fixed_discrete": last step of each length but the last one."""


class CurriculumConfig(Frozen):
    """The `curriculum_learning` section: batches are cut to a length that grows with the steps."""

    enabled: Flag = False
    """`curriculum_learning.enabled`: whether training batches are cut."""
    min_difficulty: Count = 1
    """`curriculum_learning.min_difficulty`: tokens at the first step."""
    max_difficulty: NeededCount | None = None
    """`curriculum_learning.max_difficulty`: tokens at the end; longer batches stay cut to it."""
    schedule_type: Growth = "fixed_linear"
    """`curriculum_learning.schedule_type`: "fixed_linear", "fixed_root" or "fixed_discrete"."""
    schedule_config: CurriculumSchedule = CurriculumSchedule()
    """`curriculum_learning.schedule_config`: how the length grows."""


class FlopsProfilerConfig(Frozen):
    """The `flops_profiler` section: a table of one forward, module by module."""

    enabled: Flag = False
    """`flops_profiler.enabled`: whether the table is made."""
    profile_step: FromMinusOne = 1
    """`flops_profiler.profile_step`: after this many optimizer steps the next forward is counted; -1 for never."""
    module_depth: FromMinusOne = -1
    """`flops_profiler.module_depth`: deepest level of modules to list; -1 for all."""
    top_modules: Count = 1
    """`flops_profiler.top_modules`: number of modules listed per level if `detailed` is false."""
    detailed: Flag = True
    """`flops_profiler.detailed`: whether to list every module, not only the largest of each level."""
    output_file: Text | None = None
    """`flops_profiler.output_file`: where the table goes; None for the log."""


class LayerDropConfig(Frozen):
    """The `progressive_layer_drop` section: skips blocks in a step; later steps and deeper blocks are skipped more often."""

    enabled: Flag = False
    """`progressive_layer_drop.enabled`: whether blocks are skipped in training."""
    theta: Share = 1.0
    """`progressive_layer_drop.theta`: share of the steps in which the last block runs, once that share has fallen."""
    gamma: Real = 0.001
    """`progressive_layer_drop.gamma`: how fast that share falls from 1, per optimizer step."""
