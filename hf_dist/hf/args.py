"""TrainingArguments that take our JSON: `DistTrainingArguments`, and the mixin for SFTConfig and friends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.training_args import ParallelMode
from transformers.utils import logging as hf_logging

from hf_dist.config import (
    AutoSources,
    DistConfig,
    LauncherSettings,
    axes_of,
    examine,
    read_config,
    resolve,
    settled,
    with_disagreements,
    with_elastic_batch,
)
from hf_dist.config.accelerate import launched_precision
from hf_dist.config.convert import left_to_arguments
from hf_dist.config.foreign_layout import ForeignLayout, keys_of
from hf_dist.config.refusals import refuse
from hf_dist.config.sources import splits_batches
from hf_dist.dist import excepthook, watchdog
from hf_dist.dist.launch import detect_launch
from hf_dist.dist.mesh import prepare_start
from hf_dist.dist.roles import place
from hf_dist.errors import ConfigError, Problem
from hf_dist.hf.distributed_config import take_while_alive
from hf_dist.hf.loading import stream_while_alive
from hf_dist.hf.local_place import local_index
from hf_dist.hf.monitors import report_to_monitors
from hf_dist.hf.parallelism import given_parallelism, with_layout, with_parallelism
from hf_dist.hf.roles import enter
from hf_dist.hf.signatures import show_stock
from hf_dist.log import follow_level, is_speaking_rank, say_once

CONFIG_VARIABLE = "HF_DIST_CONFIG"
_NOT_GIVEN: Any = None
_FOREIGN_ENGINES = ("ACCELERATE_USE_FSDP",)


def config_from_environment(launcher: LauncherSettings | None) -> Any:
    """The config named by HF_DIST_CONFIG or `accelerate launch`, for scripts that name none; None if neither does."""
    named = os.environ.get(CONFIG_VARIABLE)
    if named:
        return _of_variable(named, f"{CONFIG_VARIABLE} (or --config of hf_dist.run)")
    if launcher is None:
        return None
    if launcher.config_file:
        return _of_variable(launcher.config_file, "deepspeed_config_file of accelerate's configuration")
    return launcher.base_config()


def _of_variable(source: str, name: str) -> str:
    """`source`, which the script has not written itself: an error that it cannot be read names where it was written."""
    try:
        read_config(source)
    except ConfigError as error:
        raise ConfigError([replace(p, path=name) if p.path == "config" else p for p in error.problems]) from None
    return source


@dataclass
class DistArgsMixin:
    """Put it before any TrainingArguments class: `class MyArgs(DistArgsMixin, SFTConfig)`, with `@dataclass`.

    `deepspeed="ds_config.json"` means `dist_config`; the deepspeed package is not needed. For scripts that cannot be edited,
    the variable HF_DIST_CONFIG names the file. `accelerate launch` with a DeepSpeed configuration also supplies the config.
    Configs from several of these must agree. Without any of them the class behaves like its base.
    """

    dist_config: str | None = field(
        default=None, metadata={"help": "DeepSpeed-style JSON: a path, JSON text, or (in Python) a dict."}
    )
    fp8: bool = field(
        default=False,
        metadata={
            "help": 'Multiply in float8 beside bf16, as "hf_dist": {"fp8": {"enabled": true}} in the dist_config does.'
        },
    )
    logging_nan_inf_filter: bool = field(
        default=_NOT_GIVEN,
        metadata={
            "help": "Leave losses that are nan or inf out of the logs by HF's code: then the host waits for the GPU after each "
            "microbatch. Not given, with a dist_config: the same numbers without the wait; without one, as in the Trainer."
        },
    )

    filters_on_device = False
    """Whether losses that are nan or inf are left out of the logs without a wait for the GPU."""
    counts_processes = False
    """Whether `world_size` is that of the job."""
    speaks_alone = False
    """Whether HF's gather helpers treat this process as the only one."""
    _layout = _NOT_GIVEN
    """The layout that the trained model was loaded with."""

    def __post_init__(self) -> None:
        deepspeed = getattr(self, "deepspeed", None)
        launcher = LauncherSettings.from_environment(os.environ)
        if launcher or deepspeed is not None or self.dist_config is not None or os.environ.get(CONFIG_VARIABLE):
            excepthook.install()  # first, so that it also reports the errors below
        if deepspeed is not None and self.dist_config is not None and deepspeed != self.dist_config:
            raise ConfigError(
                Problem(
                    "deepspeed", repr(deepspeed), f"and dist_config={self.dist_config!r} are both given", "Keep one."
                )
            )
        source: Any = self.dist_config if self.dist_config is not None else deepspeed
        source = source if source is not None else config_from_environment(launcher)
        if launcher is not None:
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "false"  # otherwise accelerate would start DeepSpeed
        # HF's own path would import the deepspeed package and check its version.
        self.deepspeed: Any = None
        self.dist_config = source
        if source is not None:
            _follow_log_level(self)  # before anything is said
        if self.logging_nan_inf_filter is _NOT_GIVEN:
            self.logging_nan_inf_filter = source is None
            self.filters_on_device = source is not None
        self._dist: DistConfig | None = None
        if source is None:
            if self.fp8:
                fix = "Pass --dist_config, e.g. configs/zero2.json."
                raise ConfigError(
                    Problem("fp8", "true", "needs a dist_config: the Trainer alone has no products in float8", fix)
                )
            super().__post_init__()  # type: ignore[misc]
            return
        _refuse_other_engines(self)
        config, problems = examine(source, launcher=launcher)
        if problems:
            raise ConfigError(_all_problems(self, config, problems))
        config = _take_compile(self, config)
        asked: Any = self
        config = with_parallelism(config, given_parallelism(asked.parallelism_config))
        asked.parallelism_config = None
        config = config if self._layout is None else with_layout(config, self._layout)
        enter(config)  # the ranks of other roles stay there
        _take_own_folder(self)
        _choose_hardware(self)
        prepare_start()
        self._dist = config  # `world_size` below needs it: TRL's GRPO counts its batches with it
        super().__post_init__()  # type: ignore[misc]
        watchdog.start(config.hf_dist.stall_report_seconds)  # before the mesh: scripts tokenise and load data first
        self._take_over(config)

    def follow(self, layout: ForeignLayout) -> None:
        """Take over the layout that a model was loaded with (`DistributedConfig`), without a config also as the config.

        Raises `ConfigError` if the file says another size, or if the arguments have already counted batches by data ranks.
        """
        own: Any = self
        before, self._layout = self.world_size, layout
        if self._dist is None:
            own.dist_config = left_to_arguments()
            vars(self).pop("_setup_devices", None)  # which HF keeps, from a start without hf_dist
            self.__post_init__()
        else:
            self._resolve(with_layout(own._read, layout))
        if hasattr(self, "num_generations") and self.world_size != before:
            keys = ", ".join(keys_of(layout, own._dist.zero_optimization.stage))
            problem = (
                f"came with the model, after {type(self).__name__} had counted its batches over {before} data ranks"
            )
            raise ConfigError(Problem(layout.tool, "", problem, f"Write {keys} in the JSON as well."))

    def _take_over(self, config: DistConfig) -> None:
        """Resolve the values that TrainingArguments know. From here on hf_dist handles mixed precision."""
        arguments: Any = self
        wanted = launched_precision("fp8" if arguments.fp8 else arguments.mixed_precision, os.environ)
        arguments._read, arguments._wanted_precision = config, wanted
        self._resolve(config)
        report_to_monitors(arguments._dist, self)
        # Weights are in the compute dtype: no autocast around forward, no GradScaler in accelerate.
        arguments.mixed_precision = "no"
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        take_while_alive(self)
        if config.hf_dist.lazy_load:
            stream_while_alive(self)
        if getattr(arguments, "enable_jit_checkpoint", False) and config.hf_dist.save_on_signal:
            arguments.enable_jit_checkpoint = False  # both would handle SIGTERM
            say_once(
                "enable_jit_checkpoint has no effect: hf_dist.save_on_signal saves on SIGTERM, on all ranks together"
            )
        if arguments.n_gpu > 1:  # plain `python` on a machine with several GPUs: use one rank, never nn.DataParallel
            arguments._n_gpu = 1

    def _resolve(self, config: DistConfig) -> None:
        """Set `dist` to `config` with these arguments' values."""
        arguments: Any = self
        arguments._dist = config  # `world_size` reads it
        _take_elastic_batch(arguments, config)
        sources = AutoSources.from_training_arguments(arguments, data_world_size=arguments.world_size)
        arguments._dist = resolve(config, replace(sources, launcher_precision=arguments._wanted_precision))

    @property
    def parallel_mode(self) -> Any:
        """Like HF's, but "not parallel" while local_sgd replicas log."""
        return ParallelMode.NOT_PARALLEL if self.speaks_alone else super().parallel_mode  # type: ignore[misc]

    @property
    def world_size(self) -> int:
        """Number of processes that read different rows (the ranks of a pipeline share theirs). HF counts batches with it."""
        processes: int = super().world_size  # type: ignore[misc]
        config: DistConfig | None = getattr(self, "_dist", None)
        return processes if config is None or self.counts_processes else axes_of(config, processes).size("data")

    @property
    def local_process_index(self) -> int:
        """Like HF's, within the role of this process."""
        return local_index(super().local_process_index)  # type: ignore[misc]

    @contextmanager
    def main_process_first(self, *args: object, **kwargs: object) -> Iterator[None]:
        """Like HF's, which does not wait when `world_size` is 1. This one waits for the ranks of a pipeline, too."""
        first: Any = super().main_process_first(*args, **kwargs)  # type: ignore[misc]
        before, self.counts_processes = self.counts_processes, True
        own: Any = self
        state = own.distributed_state
        if state is not None:  # HF asks it once, before it waits
            firsts = {"is_local_main_process": self.local_process_index == 0, "is_main_process": state.is_main_process}
            own.distributed_state = SimpleNamespace(**{**vars(state), **firsts})
        try:
            first.__enter__()
        finally:
            self.counts_processes, own.distributed_state = before, state
        try:
            yield
        except BaseException as error:
            if not first.__exit__(type(error), error, error.__traceback__):
                raise
        else:
            first.__exit__(None, None, None)

    @property
    def dist(self) -> DistConfig | None:
        """The configuration, resolved as far as these arguments allow; None when hf_dist is off."""
        return self._dist


@dataclass
class DistTrainingArguments(DistArgsMixin, TrainingArguments):
    """`transformers.TrainingArguments` with `dist_config`."""


show_stock(DistArgsMixin, TrainingArguments)


def _follow_log_level(args: Any) -> None:
    """Say no more than HF does: `log_level`, on the other processes `log_level_replica`; "passive" leaves all as it is."""
    name = args.log_level if is_speaking_rank() else args.log_level_replica
    level = hf_logging.get_log_levels_dict().get(name)
    if level is not None:
        follow_level(level)


def _take_own_folder(args: Any) -> None:
    """Let each replica but the first write below `output_dir`, in `replica-1` and so on, without progress bars of its own."""
    where = place()
    number = 0 if where is None else where.role.replica
    if number and os.path.basename(args.output_dir or "") != f"replica-{number}":
        args.output_dir = os.path.join(args.output_dir or "trainer_output", f"replica-{number}")
        args.disable_tqdm = True if args.disable_tqdm is None else args.disable_tqdm


def _refuse_other_engines(args: Any) -> None:
    problems = [
        Problem(
            name,
            os.environ[name],
            "starts another engine",
            "Write `distributed_type: MULTI_GPU` into accelerate's YAML, or use torchrun; `hf-dist config convert` takes its "
            "settings over.",
        )
        for name in _FOREIGN_ENGINES
        if os.environ.get(name, "").lower() in ("1", "true", "yes")
    ]
    if getattr(args, "fsdp", None):
        problems.append(
            Problem(
                "fsdp",
                repr(args.fsdp),
                "starts another engine",
                'Remove it; "zero_optimization": {"stage": 3} is FSDP.',
            )
        )
    if problems:
        raise ConfigError(problems)


def _all_problems(args: object, config: DistConfig, known: list[Problem]) -> list[Problem]:
    """`known`, and conflicts between the arguments and an already invalid config, so that one error shows all problems."""
    try:
        ranks = axes_of(config, detect_launch().world_size).size("data")
    except ConfigError as error:
        return known + error.problems
    return with_disagreements(config, AutoSources.from_training_arguments(args, data_world_size=ranks), known)


def _take_compile(args: Any, config: DistConfig) -> DistConfig:
    """Move `torch_compile` into the `compile` section, because HF would compile the whole model with the engine's hooks."""
    backend, mode = getattr(args, "torch_compile_backend", None), getattr(args, "torch_compile_mode", None)
    if mode is not None:
        problem = "is not available together with dist_config: blocks are compiled in torch's default mode"
        raise ConfigError(Problem("torch_compile_mode", repr(mode), problem, "Remove it."))
    if not (getattr(args, "torch_compile", False) or backend is not None):
        return config
    args.torch_compile, args.torch_compile_backend = False, None
    changes = {"compile.enabled": (True, "auto <- TrainingArguments.torch_compile")}
    if backend is not None:
        changes["compile.backend"] = (backend, "auto <- TrainingArguments.torch_compile_backend")
    config = config.replaced(changes)
    refuse(config)
    return config


def _take_elastic_batch(args: Any, config: DistConfig) -> None:
    """Copy the batch sizes chosen by `elasticity` into the arguments, where the Trainer's loader and accumulation read them."""
    if config.elasticity.enabled:
        sizes = with_elastic_batch(config, args.world_size)
        ranks = args.world_size if splits_batches(args) else 1
        args.per_device_train_batch_size = (settled(sizes.train_micro_batch_size_per_gpu) or 1) * ranks
        args.gradient_accumulation_steps = settled(sizes.gradient_accumulation_steps)


def _choose_hardware(args: Any) -> None:
    """Let accelerate see the job that the launcher started.

    On a machine without accelerators, accelerate treats each rank as a single process unless it is told to use the CPU. Every
    rank would then train alone on the same data.
    """
    launch = detect_launch()
    if torch.accelerator.is_available():
        return
    args.use_cpu = True  # also needed with one process: HF refuses bf16 without it
    if launch.world_size > 1:
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
