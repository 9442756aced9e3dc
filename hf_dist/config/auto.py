"""Fills "auto" values and checks numbers that must agree with TrainingArguments, in two phases.

Phase 1, when TrainingArguments are created: batch, learning rate, precision. Phase 2 (`final=True`), when the model and
the number of steps are known: buckets and schedule. Afterwards no value is "auto". `resolve` may be called again with
new sources: it fills its own values again, and compares only values from the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hf_dist.config.batch import MICRO, NO_MULTIPLE, STEPS, TRAIN, BatchSizes, solve_batch
from hf_dist.config.elastic import elastic_sizes
from hf_dist.config.findings import Note
from hf_dist.config.schema import DistConfig
from hf_dist.config.sources import AutoSources
from hf_dist.config.values import is_auto, shown
from hf_dist.errors import ConfigError, Problem

_ZERO = "zero_optimization"
_BATCH = (TRAIN, MICRO, STEPS)


@dataclass(frozen=True)
class AutoRule:
    """One key that accepts "auto"."""

    path: str
    """JSON path."""
    source: str
    """Attribute of AutoSources that holds the value."""
    label: str
    """Where the value comes from, for the table and the messages."""
    option: str = ""
    """Command line option that sets it; for a pair, two options separated by a space."""
    must_match: bool = False
    """Whether a value in the file must equal the source."""
    fill_absent: bool = False
    """Whether a missing key is filled like "auto"."""
    stage3: bool = False
    """Whether the source applies at ZeRO stage 3 only."""


def _argument(path: str, name: str, **flags: bool) -> AutoRule:
    return AutoRule(path, name, f"TrainingArguments.{name}", f"--{name}", **flags)


AUTO_TABLE: tuple[AutoRule, ...] = (
    _argument(MICRO, "per_device_train_batch_size", must_match=True, fill_absent=True),
    _argument(STEPS, "gradient_accumulation_steps", must_match=True, fill_absent=True),
    _argument("gradient_clipping", "max_grad_norm", must_match=True, fill_absent=True),
    _argument("fp16.enabled", "fp16", fill_absent=True),
    _argument("bf16.enabled", "bf16", fill_absent=True),
    AutoRule("hf_dist.fp8.enabled", "fp8", "--fp8, or mixed_precision of accelerate", "--fp8", fill_absent=True),
    _argument("optimizer.params.lr", "learning_rate", must_match=True),
    AutoRule(
        "optimizer.params.betas",
        "adam_betas",
        "TrainingArguments.adam_beta1, adam_beta2",
        "--adam_beta1 --adam_beta2",
        must_match=True,
    ),
    AutoRule(
        "optimizer.params.eps", "adam_epsilon", "TrainingArguments.adam_epsilon", "--adam_epsilon", must_match=True
    ),
    _argument("optimizer.params.weight_decay", "weight_decay", must_match=True),
    AutoRule("scheduler.params.warmup_min_lr", "lowest_lr", "0"),
    _argument("scheduler.params.warmup_max_lr", "learning_rate", must_match=True),
    _argument("scheduler.params.warmup_num_steps", "warmup_steps", must_match=True),
    AutoRule(
        "scheduler.params.total_num_steps",
        "num_training_steps",
        "the number of training steps",
        "--max_steps",
        must_match=True,
    ),
    AutoRule("hf_dist.tiled_loss", "only_loss_is_read", "the Trainer", fill_absent=True),
    AutoRule(f"{_ZERO}.reduce_bucket_size", "hidden_squared", "hidden_size ** 2"),
    AutoRule(f"{_ZERO}.stage3_prefetch_bucket_size", "prefetch_numel", "0.9 * hidden_size ** 2", stage3=True),
)
"""Every key that has a source. `train_batch_size` is the product of the batch keys and the data ranks."""

_DEFAULTED = (
    *("hf_dist.tiled_loss", "hf_dist.sequence_regions"),
    *(
        f"{_ZERO}.{key}"
        for key in (
            *("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "stage3_prefetch_bucket_size"),
            *("offload_param.buffer_size", "offload_param.max_in_cpu"),
        )
    ),
)
"""Keys that cannot change a result: without a source, "auto" means the default."""

_OF_THE_TRAINER = (
    *("tensorboard", "wandb", "csv_monitor", "comms_logger"),
    *("curriculum_learning", "flops_profiler", "progressive_layer_drop"),
)
"""Sections that do nothing in a custom loop."""

_FOUND_LATER = frozenset(
    {
        *("hf_dist.memory_budget", "hf_dist.sequence_regions", "hf_dist.sequence_parallel"),
        "expert_parallel.autoep_size",
    }
)
"""Keys whose "auto" is measured at the place of use."""

_DEFAULTS = DistConfig()


def source_of_auto(path: str) -> str:
    """Where the value of "auto" at `path` comes from, as a clause."""
    if path == TRAIN:
        return f"{MICRO} x {STEPS} x data ranks"
    if path in _FOUND_LATER:
        return "measured where it is used"
    label = next((rule.label for rule in AUTO_TABLE if rule.path == path), "")
    return (
        " else ".join(filter(None, (label, "its default" if path in _DEFAULTED else "")))
        or "found when training starts"
    )


@dataclass
class _Resolution:
    config: DistConfig
    changes: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def value(self, path: str) -> Any:
        return self.changes[path][0] if path in self.changes else self.config.value_at(path)

    def explicit(self, path: str) -> bool:
        """Whether the file, the launcher or another tool's layout gives a value other than "auto"."""
        return self.config.source_of(path).startswith(("file", "launcher", "layout"))

    def fill(self, path: str, value: object, origin: str) -> None:
        how = "absent" if self.config.source_of(path).split(" ")[0] in ("default", "absent") else "auto"
        self.changes[path] = (value, f"{how} <- {origin}")

    def problem(self, path: str, expected: str, fix: str) -> None:
        where, found = self.config.spelled(path), shown(self.value(path))
        self.problems.append(Problem(where, found, expected, fix, self.config.at_line(path)))

    def result(self) -> DistConfig:
        if self.problems:
            raise ConfigError(self.problems)
        return self.config.replaced(self.changes, tuple(self.notes))


def resolve(config: DistConfig, sources: AutoSources, *, final: bool = False) -> DistConfig:
    """`config` with "auto" filled from TrainingArguments. One ConfigError reports every disagreement."""
    config = with_elastic_batch(config, sources.data_world_size)
    work = _Resolution(config)
    for rule in AUTO_TABLE:
        _apply(rule, sources, work)
    _check_precision(work, sources)
    _resolve_batch(work, sources)
    _note_overrides(work, sources)
    if final:
        fix = 'Write a value, or remove the key; "auto" has no source here.'
        _settle(work, fix, on_gpu=sources.on_gpu)
    return work.result()


def with_disagreements(
    config: DistConfig, sources: AutoSources, known: list[Problem], *, ranks_known: bool = True
) -> list[Problem]:
    """`known`, the errors of a config, and those that `resolve` finds besides.

    A total that fits no number of ranks is told with the one that fits these ranks, where they are known.
    """
    try:
        resolve(config, sources)
    except ConfigError as error:
        wrong = {problem.path for problem in known if problem.found}
        batch = wrong & {config.spelled(path) for path in _BATCH}
        wrong |= set(_BATCH) if batch else set()
        total = [problem for problem in error.problems if problem.path == TRAIN]
        if ranks_known and total and batch == {config.spelled(TRAIN)}:
            known = [total[0] if p.path in batch and p.expected.startswith(NO_MULTIPLE) else p for p in known]
        return known + [problem for problem in error.problems if problem.path not in wrong]
    return known


def with_elastic_batch(config: DistConfig, data_ranks: int) -> DistConfig:
    """`config` with the batch sizes that its `elasticity` section gives for these ranks; unchanged if the section is off."""
    if not config.elasticity.enabled:
        return config
    try:
        sizes = elastic_sizes(config.elasticity, data_ranks)
    except ConfigError as error:
        raise ConfigError([replace(p, file=config.at_line(p.path)) for p in error.problems]) from None
    solved = {TRAIN: sizes.train, MICRO: sizes.micro, STEPS: sizes.accumulation}
    return config.replaced({path: (size, "absent <- elasticity") for path, size in solved.items()})


def _note_overrides(work: _Resolution, sources: AutoSources) -> None:
    """Note sections of the file that override an argument set by the user."""
    scheduler, optimizer = work.config.scheduler, work.config.optimizer
    kind, optim = sources.lr_scheduler_type, sources.optim
    if scheduler is not None and kind not in ("", "linear"):
        reason = f'"scheduler" in the config decides: {scheduler.type}'
        work.notes.append(Note(f"--lr_scheduler_type {kind}", reason, "override"))
    if optimizer is not None and optim and not optim.startswith("adamw_torch"):
        reason = f'"optimizer" in the config decides: {optimizer.type}'
        work.notes.append(Note(f"--optim {optim}", reason, "override"))


def resolve_without_trainer(
    config: DistConfig,
    *,
    data_ranks: int = 1,
    hidden_size: int | None = None,
    num_training_steps: int | None = None,
    on_gpu: bool = False,
) -> DistConfig:
    """`config` for a custom loop: the micro batch may stay None, and gradients are clipped if the file says so."""
    config = with_elastic_batch(config, data_ranks)
    work = _Resolution(config)
    if not work.explicit("gradient_clipping"):
        # DeepSpeed and torch do not clip by default; "auto" means the Trainer's value.
        work.fill("gradient_clipping", 0.0 if config.gradient_clipping is None else 1.0, "default")
    for section in _OF_THE_TRAINER:
        if config.value_at(f"{section}.enabled"):
            work.notes.append(Note(f"{section}.enabled", "read by the Trainer; a custom loop does that itself"))
    known = config.elasticity.enabled
    given = {path: work.value(path) if known or work.explicit(path) else None for path in _BATCH}
    try:
        _write_batch(work, solve_batch(given[TRAIN], given[MICRO], given[STEPS], data_ranks), given)
    except ConfigError as error:
        hint = _ranks_hint(config, data_ranks)
        for problem in error.problems:
            line = config.at_line(problem.path)
            work.problems.append(replace(problem, expected=problem.expected + hint, file=line))
        work.changes.update({path: (None, "default") for path in _BATCH if is_auto(config.value_at(path))})
    sources = AutoSources(data_world_size=data_ranks, hidden_size=hidden_size, num_training_steps=num_training_steps)
    for rule in AUTO_TABLE:
        if rule.source in ("lowest_lr", "num_training_steps", "hidden_squared", "prefetch_numel"):
            _apply(replace(rule, must_match=False), sources, work)
    rate = config.value_at("optimizer.params.lr")
    if is_auto(work.value("scheduler.params.warmup_max_lr")) and isinstance(rate, float):
        work.fill("scheduler.params.warmup_max_lr", rate, "optimizer.params.lr")
    for path, other in (("fp16.enabled", "bf16.enabled"), ("bf16.enabled", "fp16.enabled")):
        if is_auto(work.value(path)) and work.value(other) is True:
            work.fill(path, False, other)
    _settle(work, 'Write a value: without a Trainer nothing fills "auto" here.', on_gpu=on_gpu)
    return work.result()


def _apply(rule: AutoRule, sources: AutoSources, work: _Resolution) -> None:
    """Fill the key of one rule, or compare it with its source."""
    value, label = getattr(sources, rule.source), rule.label
    if rule.source in ("fp16", "bf16"):
        value, label = sources.precision(rule.source)
    if value is None or (rule.stage3 and work.config.zero_optimization.stage < 3):
        return
    path = rule.path
    if path == "bf16.enabled" and work.config.torch_autocast.enabled and work.config.source_of(path) == "default":
        return  # the meaning of `bf16=True` in the stock Trainer: autocast over fp32 weights
    if path in _BATCH and work.config.elasticity.enabled:
        return
    source = work.config.source_of(path)
    found_by_trial = path == MICRO and sources.auto_find_batch_size
    if found_by_trial or source.startswith(("auto", "absent")) or (source == "default" and rule.fill_absent):
        work.fill(path, value, label)
    elif rule.must_match and work.explicit(path) and not _same(path, work.value(path), value):
        line = work.config.lines.get(work.config.spelled(path))
        place = f" on line {line}" if line else ""
        remedy = f'Set it to "auto"{place}'
        if source.startswith("launcher"):
            remedy = f"Delete {source.rpartition(' ')[2]} (the configuration of accelerate)"
        wanted = work.value(path)
        each = zip(rule.option.split(), wanted if isinstance(wanted, list) else [wanted], strict=True)
        options = " ".join(f"{option} {setting}" for option, setting in each)
        work.problem(path, f"differs from {label} = {shown(value)}", f"{remedy}, or pass {options}.")


def _same(path: str, written: Any, value: object) -> bool:
    if path.endswith("warmup_num_steps"):
        return bool(max(1, written) == value)
    if path.endswith("warmup_max_lr") and isinstance(written, list):
        return True
    return bool(written == value)


def _check_precision(work: _Resolution, sources: AutoSources) -> None:
    """The file alone may turn a precision on. It may not turn off, or combine, a precision that the arguments turn on."""
    for name in ("fp16", "bf16"):
        path = f"{name}.enabled"
        turned_on, origin = sources.precision(name)
        if turned_on and work.explicit(path) and work.config.value_at(path) is False:
            fix = f'Set it to "auto", or {_turn_off(name, origin)}.'
            work.problem(path, f"differs from {origin}, which is true", fix)
    path = "hf_dist.fp8.enabled"
    if sources.fp8 and work.explicit(path) and work.config.value_at(path) is False:
        work.problem(
            path, "differs from --fp8, or mixed_precision of accelerate", "Set it to true, or remove the other."
        )
    if work.value("fp16.enabled") is True and work.value("bf16.enabled") is True:
        path = "fp16.enabled" if work.explicit("fp16.enabled") else "bf16.enabled"
        other = "bf16" if path.startswith("fp16") else "fp16"
        origin = work.changes.get(f"{other}.enabled", ("", "the file"))[1].rpartition("<- ")[2]
        expected = f"contradicts {other}, which is turned on by {origin}"
        work.problem(path, expected, f"Set it to false, or {_turn_off(other, origin)}.")


def _turn_off(name: str, origin: str) -> str:
    return f"do not pass --{name}" if origin.startswith("TrainingArguments") else "set that to no"


def _resolve_batch(work: _Resolution, sources: AutoSources) -> None:
    """Settle `train_batch_size` from the other two, or check it against them."""
    micro, steps = work.value(MICRO), work.value(STEPS)
    if work.config.elasticity.enabled or not isinstance(micro, int) or not isinstance(steps, int):
        return
    free = sources.auto_find_batch_size or not work.explicit(TRAIN)
    try:
        sizes = solve_batch(None if free else work.value(TRAIN), micro, steps, sources.data_world_size)
    except ConfigError as error:
        named = {MICRO: "--per_device_train_batch_size", STEPS: "--gradient_accumulation_steps"}
        filled = ", ".join(f"{path} comes from {named[path]}" for path in named if not work.explicit(path))
        hint = (f"; {filled}" if filled else "") + _ranks_hint(work.config, sources.data_world_size)
        number = work.config.lines.get(work.config.spelled(TRAIN))
        delete = f"Delete line {number}: the product is what is used then" if number else f'Set {TRAIN} to "auto"'
        for problem in error.problems:
            expected, line = problem.expected + hint, work.config.at_line(problem.path)
            fix = f"{delete}. Or: {problem.fix}" if problem.path == TRAIN and problem.fix else problem.fix
            work.problems.append(replace(problem, expected=expected, fix=fix, file=line))
        return
    if free:
        work.fill(TRAIN, sizes.train, "micro batch x accumulation x data ranks")


def _ranks_hint(config: DistConfig, data_ranks: int) -> str:
    """Why there are fewer data ranks than processes; empty if every rank reads its own rows."""
    stages, cut = config.pipeline.stages, config.tensor_parallel.autotp_size
    if cut == 1:
        return f"; {stages * data_ranks} processes in {stages} stages are {data_ranks} data ranks" if stages > 1 else ""
    each = f"{stages} stages of {cut} ranks" if stages > 1 else f"groups of {cut} (tensor_parallel.autotp_size)"
    return f"; {stages * cut * data_ranks} processes in {each} are {data_ranks} data ranks"


def _write_batch(work: _Resolution, sizes: BatchSizes, given: Mapping[str, int | None]) -> None:
    solved = {TRAIN: sizes.train, MICRO: sizes.micro, STEPS: sizes.accumulation}
    for path, size in solved.items():
        if given[path] is None and (size is not None or is_auto(work.value(path))):
            work.fill(path, size, "the data loader" if size is None else "the other batch sizes")


def _settle(work: _Resolution, fix: str, *, on_gpu: bool) -> None:
    """After the last sources: use defaults where they are harmless; report any other key that is still "auto"."""
    zero = work.config.zero_optimization
    for path in _DEFAULTED:
        if is_auto(work.value(path)):
            work.fill(path, _DEFAULTS.value_at(path), "default")
    if work.value(f"{_ZERO}.overlap_comm") is None:
        overlap = f"{_ZERO}.overlap_comm"
        source = work.changes[overlap][1] if overlap in work.changes else "default"
        # On a CPU, transfers use the same cores as computation; data in flight costs memory at every stage.
        work.changes[overlap] = (on_gpu or zero.stage == 3, source)
    regions = "hf_dist.sequence_regions"
    if not on_gpu and work.config.tensor_parallel.autotp_size > 1 and work.config.source_of(regions) == "default":
        # Regions send twice as many messages. Over gloo, a message costs more than the work that they save.
        work.changes[regions] = (False, "default")
    for path, source in work.config.sources.items():
        if source == "auto" and is_auto(work.value(path)) and path not in _FOUND_LATER:
            work.problem(path, "has no source to be filled from", fix)
    wanted = work.config.data_types.param_dtype
    on = [name for name in ("fp16", "bf16") if work.value(f"{name}.enabled") is True]
    actual = on[0] if on else "fp32"
    if wanted is not None and wanted != actual:
        expected = f"differs from the precision of the weights, which is {actual}"
        work.problem("data_types.param_dtype", expected, "Remove it, or enable that precision.")
