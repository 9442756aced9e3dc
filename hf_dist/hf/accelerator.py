"""`DistAccelerator`, the one seam to accelerate: the Trainer, TRL and raw `accelerate` loops all call it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from hf_dist.checkpoint import random_state
from hf_dist.config import (
    AutoSources,
    BatchSizes,
    DistConfig,
    LauncherSettings,
    axes_of,
    hidden_size_of,
    load_config,
    resolve,
)
from hf_dist.config.accelerate import launched_precision
from hf_dist.config.foreign_layout import keys_of
from hf_dist.dist import collectives, excepthook, watchdog
from hf_dist.dist.collective_guard import every_rank
from hf_dist.dist.launch import detect_launch
from hf_dist.dist.mesh import DEFAULT_TIMEOUT, ParallelMesh, prepare_start, wait_for_job
from hf_dist.engine.build import build_engine, mesh_for
from hf_dist.engine.engine import Engine
from hf_dist.engine.pipeline_runner import Example
from hf_dist.errors import ConfigError, ModelError, Problem
from hf_dist.hf import loop_config
from hf_dist.hf.accelerator_options import check_options
from hf_dist.hf.clipping import ClippingMixin
from hf_dist.hf.comm_hook import with_comm_hook
from hf_dist.hf.connected_roles import connect_prepared
from hf_dist.hf.counting_losses import let_losses_count_once
from hf_dist.hf.data import make_seekable, note_dropping, read_everywhere
from hf_dist.hf.distributed_config import asked_layout, take_while_alive
from hf_dist.hf.dummies import DummyOptim, DummyScheduler, real_optimizer, real_scheduler
from hf_dist.hf.evaluation import ShorterBatch, count_rows
from hf_dist.hf.gathers import GathersMixin
from hf_dist.hf.loading import stream_while_alive
from hf_dist.hf.local_place import LocalPlaceMixin
from hf_dist.hf.local_sgd import let_local_sgd_work
from hf_dist.hf.loop_checkpoints import LoopCheckpointsMixin
from hf_dist.hf.optimizer import DistOptimizer, set_beside
from hf_dist.hf.parallelism import given_parallelism, with_layout, with_parallelism
from hf_dist.hf.peft import inactive_adapters_trainable, refuse_prompt_learning
from hf_dist.hf.pipeline import example_from
from hf_dist.hf.remote_model import RemoteModel
from hf_dist.hf.roles import enter
from hf_dist.hf.scheduler import DataRankScheduler
from hf_dist.hf.signatures import show_stock, with_config
from hf_dist.hf.state_dict import full_state_dict, part_state_dict
from hf_dist.hf.stateful_loaders import refuse_wrong_positions
from hf_dist.hf.streams.own_division import refuse_other_loader
from hf_dist.hf.streams.prepare import stream_loader
from hf_dist.hf.training_loop import MicrobatchCount, TrainingLoop
from hf_dist.hf.trl_heads import let_trl_read_heads
from hf_dist.hf.vllm_sync import let_vllm_gather
from hf_dist.hf.window_loss import cover_trl
from hf_dist.memory.activation import set_up_checkpointing
from hf_dist.sharding.guard import replace_method
from hf_dist.sharding.ownership import check_owner, shards_of
from hf_dist.sharding.precision import DTYPES


class DistAccelerator(ClippingMixin, GathersMixin, LocalPlaceMixin, LoopCheckpointsMixin, Accelerator):
    """An `Accelerator` whose `prepare` shards the model in place as the JSON says. Everything else behaves as in accelerate.

    In a custom loop: `DistAccelerator(dist_config="zero3.json", ...)`, with accelerate's other arguments. Without
    `dist_config`, HF_DIST_CONFIG or `accelerate launch` names the config. The Trainer's accelerator is converted by `adopt`.
    """

    @with_config(Accelerator.__init__)  # type: ignore[misc]  # mypy takes no decorated constructor; pyright does
    def __init__(
        self, *args: object, dist_config: str | os.PathLike[str] | Mapping[str, object] | None = None, **kwargs: object
    ) -> None:
        loop_config.tell_rank_of_debug_launcher()
        excepthook.install()
        check_options(kwargs)
        launch = detect_launch()
        if launch.world_size > 1 and not torch.accelerator.is_available():
            kwargs.setdefault("cpu", True)
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        wanted = launched_precision(kwargs.pop("mixed_precision", None), os.environ)
        settings = LauncherSettings.from_environment(os.environ)
        if settings is not None:
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "false"  # otherwise accelerate would start DeepSpeed
        read = load_config(loop_config.named(dist_config, settings), launcher=settings)
        read = with_parallelism(read, given_parallelism(kwargs.pop("parallelism_config", None)))
        handlers: Any = kwargs.get("kwargs_handlers")
        read = with_comm_hook(read, handlers or ())
        loop_config.take_accumulation(read.gradient_accumulation_steps, kwargs)
        enter(read)  # the ranks of other roles stay there
        prepare_start()
        super().__init__(*args, mixed_precision="no", **kwargs)
        watchdog.start(read.hf_dist.stall_report_seconds)
        self._launcher_precision = wanted
        self._read(read)
        take_while_alive(self)
        if read.hf_dist.lazy_load:
            stream_while_alive(self)

    def _read(self, asked: DistConfig) -> None:
        """Follow a config, as read, in a loop without a Trainer."""
        config = loop_config.without_trainer(asked, self.gradient_accumulation_steps)
        sources = AutoSources(
            data_world_size=axes_of(config, int(self.state.num_processes)).size("data"),
            bf16=False,
            fp16=False,
            launcher_precision=self._launcher_precision,
        )
        self._init_dist(resolve(config, sources), TrainingLoop())
        self._asked = asked  # `_init_dist` has set it to the resolved config

    def _follow(self, model: nn.Module) -> None:
        """Take over the layout that `model` was loaded with (`DistributedConfig`), unless the axes of the job are in use."""
        layout = asked_layout(model)
        wanted = self._asked if layout is None else with_layout(self._asked, layout)
        if layout is None or all(wanted.value_at(path) == self._asked.value_at(path) for path in wanted.sources):
            return
        if self._mesh is not None or self._dataloaders or self.around.own_model is not None:
            keys = ", ".join(keys_of(layout, wanted.zero_optimization.stage))
            problem = f"came with {type(model).__name__}, when other parts of the job were prepared already"
            raise ConfigError(Problem(layout.tool, "", problem, f"Write {keys} in the JSON as well."))
        self._read(wanted)

    @classmethod
    def adopt(cls, accelerator: Accelerator, config: DistConfig, around: TrainingLoop) -> DistAccelerator:
        """Turn an existing accelerator into this class, in the loop `around`. References to the accelerator stay valid."""
        accelerator.__class__ = cls
        adopted: Any = accelerator
        adopted._init_dist(config, around)
        return adopted

    def _init_dist(self, config: DistConfig, around: TrainingLoop) -> None:
        let_local_sgd_work()
        launch = detect_launch()
        if launch.world_size != self.state.num_processes:
            raise ConfigError(
                Problem(
                    "WORLD_SIZE",
                    str(launch.world_size),
                    f"processes were started by {launch.launcher}, but accelerate sees {self.state.num_processes}: every "
                    "process would train alone on the same data",
                    "On a machine without GPUs set ACCELERATE_USE_CPU=true before starting, or create the "
                    "DistTrainingArguments / DistAccelerator before any other accelerate object.",
                )
            )
        self.dist_config = config
        self.axes = axes_of(config, launch.world_size)
        """Which ranks read which rows and hold which layers."""
        self.engines: list[Engine] = []
        """Engines of the trained models, in the order of `prepare`."""
        self.frozen: list[Engine] = []
        """Engines of models prepared for evaluation only: reference, reward, teacher."""
        self.around = around
        """The loop that calls this accelerator."""
        self._example_loader: Any = None
        self.shorter_batch = ShorterBatch()
        self.stream_microbatches: int | None = None
        """Of a window, while the Trainer's training loader is prepared: a dataset without an index then streams."""
        init: Any = getattr(self, "init_handler", None)
        self.timeout: timedelta = around.timeout or (None if init is None else init.timeout) or DEFAULT_TIMEOUT
        self._mesh: ParallelMesh | None = None
        self._first_model: nn.Module | None = None  # the first model that a custom loop prepared
        self._may_reduce = True
        self._asked = config
        """The config as read, with the optimizer and scheduler that a custom loop's dummies stand for."""
        self._micro_batch: int | None = None
        """Rows per rank and batch of a custom loop's training loader; None until `prepare` sees the loader."""

    def __getstate__(self) -> dict[str, object]:
        """What a copy in another process can use: settings and loaders, without the prepared models and their groups."""
        left_out: dict[str, object] = {"engines": [], "frozen": [], "_models": [], "_optimizers": [], "_schedulers": []}
        left_out |= {"_mesh": None, "_first_model": None, "around": TrainingLoop(), "shorter_batch": ShorterBatch()}
        return {**self.__dict__, **left_out}

    def draw_alike(self) -> None:
        """Give ranks that read the same rows the same random state, because a script may have seeded each rank differently.

        Every rank calls it.
        """
        if self._shares_rows:
            random_state.put_back(collectives.broadcast_object(self.mesh.views["batch"], random_state.raw()))

    @property
    def mesh(self) -> ParallelMesh:
        """Axes and process groups, created at the first use. All ranks must make that first use together."""
        if self._mesh is None:
            model = self._first_model if self.around.own_model is None else self.around.own_model
            self._mesh = mesh_for(self.dist_config, device=self.device, timeout=self.timeout, model=model)
        return self._mesh

    @property
    def engine(self) -> Engine:
        """The engine of the trained model (of the first one, if there are several)."""
        if not self.engines:
            raise ModelError("no model was prepared yet: call accelerator.prepare(model, optimizer, ...) first")
        return self.engines[0]

    def _engine_holding(self, params: Any) -> Engine:
        """The engine whose model owns the first of `params`. With a single engine nothing is checked."""
        if len(self.engines) > 1:
            first = next(iter(params), None)
            for engine in self.engines:
                if any(p is first for p in engine.model.parameters()):
                    return engine
        return self.engine

    def _ends_window(self) -> bool:
        """Whether the current microbatch is the last one before an optimizer step, by accelerate's count.

        With `sync_each_batch`, gradients are reduced after each: they are ready for more, as after an unforeseen backward.
        """
        each = self.gradient_state.plugin_kwargs.get("sync_each_batch", False) and self.engines[0].window.early is None
        return bool((self.sync_gradients or each) and self._may_reduce)

    def engine_of(self, model: nn.Module) -> Engine | None:
        """The engine of `model`; None if this accelerator did not prepare it, or another one has prepared it since."""
        return next((e for e in self._current_engines() if e.model is model), None)

    def _current_engines(self) -> Iterator[Engine]:
        return (e for e in (*self.engines, *self.frozen) if shards_of(e.model) is e.sharded)

    def engine_containing(self, part: nn.Module) -> Engine | None:
        """The engine of the model that contains `part` (for example a base model whose adapters were merged), or None."""
        return next((e for e in self._current_engines() if any(m is part for m in e.model.modules())), None)

    def end_training(self) -> None:
        """Like accelerate's, which destroys all process groups, but first waits for every rank and its GPU. Collective."""
        wait_for_job()
        super().end_training()

    # ------------------------------------------------------------------- prepare

    def prepare(self, *args: object, device_placement: list[bool] | None = None) -> Any:
        """Shard models, bind optimizers to them, wrap loaders and schedulers. Returns them in the given order. Collective."""
        if self._micro_batch is None:
            self._micro_batch = loop_config.micro_batch(args, self.num_processes if self.split_batches else 1)
        for obj in args:
            if isinstance(obj, nn.Module):
                self._follow(obj)
        ready: dict[int, Any] = {}
        # Models before optimizers: an optimizer steps the fragments of a sharded model.
        for obj in args:
            if isinstance(obj, nn.Module):
                ready[id(obj)] = self.prepare_model(obj)
        for obj in args:
            if isinstance(obj, torch.optim.Optimizer):
                ready[id(obj)] = self.prepare_optimizer(obj)
            elif isinstance(obj, DummyOptim):
                obj.params = list(obj.params)
                first = (p for item in obj.params for p in (item["params"] if isinstance(item, dict) else [item]))
                engine = self._engine_holding(first)
                ready[id(obj)] = self.prepare_optimizer(real_optimizer(obj, self._asked, engine.model))
        for obj in args:
            if isinstance(obj, DummyScheduler):
                ready[id(obj)] = self._prepare_dummy(obj, ready.get(id(obj.optimizer), obj.optimizer))
        rest = [obj for obj in args if id(obj) not in ready]
        if rest:
            prepared = super().prepare(*rest)
            for obj, done in zip(rest, prepared if len(rest) > 1 else (prepared,), strict=True):
                ready[id(obj)] = done
        # As accelerate marks what it has prepared. Not the model, which stays the user's object: another accelerator would take
        # it for its own.
        for obj in ready.values():
            if not isinstance(obj, nn.Module):
                with suppress(AttributeError):
                    obj._is_accelerate_prepared = True
        result = tuple(ready[id(obj)] for obj in args)
        return result if len(result) != 1 else result[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard `model` in place and return it. A second model in evaluation mode is frozen and has no training state."""
        let_vllm_gather()
        let_trl_read_heads()
        if isinstance(model, RemoteModel):
            model.bind(self.mesh)
            connect_prepared(model, self.engines)
            return model
        self._follow(model)
        known = next((e for e in (*self.engines, *self.frozen) if e.model is model), None)
        if known is not None:
            if evaluation_mode:
                return model  # a forward works, whichever accelerator owns the model now or if it is an ordinary one
            check_owner(model, known.sharded)
            set_up_checkpointing(model, self.dist_config)  # HF's switch was set again by a second `train()`
        else:
            trainable = not evaluation_mode or model is self.around.own_model
            self._first_model = model if self._first_model is None else self._first_model
            config = self._config_for(model)
            refuse_prompt_learning(model)
            let_losses_count_once(model, self.axes.size("pp"))
            with inactive_adapters_trainable(model) if trainable else nullcontext():
                engine = build_engine(
                    model,
                    config,
                    self.mesh,
                    self._batch_sizes(config),
                    trainable=trainable,
                    example=Example(lambda: example_from(self._example_loader), self.around.calls_model),
                    loop=MicrobatchCount(
                        self._ends_window, self.around, self.engines[0].scaler if self.engines else None
                    ),
                )
            cover_trl(engine)
            self._give_no_sync(model)
            (self.engines if trainable else self.frozen).append(engine)
        if model not in self._models:
            self._models.append(model)
        return model

    def _give_no_sync(self, model: nn.Module) -> None:
        """Add `model.no_sync()`, which DDP models have and training loops call."""
        me = weakref.ref(self)

        def no_sync(module: nn.Module) -> AbstractContextManager[None]:
            accelerator = me()
            return nullcontext() if accelerator is None else accelerator.no_sync(module)

        if not hasattr(model, "no_sync"):
            replace_method(model, "no_sync", no_sync)

    def _config_for(self, model: nn.Module) -> DistConfig:
        """The config, fully resolved except for the schedule, whose length is known only when it is created."""
        width = hidden_size_of(getattr(model, "config", None))
        config = self.dist_config
        if self.around.own_model is None:
            config = loop_config.with_micro_batch(config, self._micro_batch)
        unknown = [p for p, source in config.sources.items() if p.startswith("scheduler.") and source == "auto"]
        config = config.replaced({path: (config.value_at(path), "when the schedule is made") for path in unknown})
        on_gpu = self.device.type == "cuda"
        sources = AutoSources(data_world_size=self.num_processes, hidden_size=width, on_gpu=on_gpu)
        return resolve(config, sources, final=True)

    def _batch_sizes(self, config: DistConfig) -> BatchSizes:
        micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
        steps = steps if isinstance(steps, int) else self.gradient_accumulation_steps
        if not isinstance(micro, int):
            return BatchSizes(None, None, steps, self.num_processes)
        return BatchSizes(micro * steps * self.num_processes, micro, steps, self.num_processes)

    def prepare_data_loader(self, *args: object, **kwargs: object) -> Any:
        """Like accelerate's, but the result can seek to any batch on resume.

        With `use_stateful_dataloader`, `save_state` keeps its position.
        """
        self._example_loader = given = args[0] if args else kwargs["data_loader"]
        if self._shares_rows or self.dist_config.local_sgd.every:
            read_everywhere(self, given)
        if self.stream_microbatches or (self.use_stateful_dataloader and self.around.own_model is None):
            stream = stream_loader(self, given, bool(kwargs.get("device_placement", self.device_placement)))
            if stream is not None:
                self._dataloaders.append(stream)
                return stream
        refuse_other_loader(getattr(given, "dataset", None), detect_launch().world_size)
        refuse_wrong_positions(self)
        loader = super().prepare_data_loader(*args, **kwargs)
        note_dropping(loader)
        count_rows(loader)
        sought = make_seekable(loader)
        if sought is not loader:
            self._dataloaders[:] = [sought if known is loader else known for known in self._dataloaders]
        return sought

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Bind `optimizer` to the engine of the model whose parameters it holds."""
        if not isinstance(optimizer, DistOptimizer):
            engine = self._engine_holding(p for group in optimizer.param_groups for p in group["params"])
            beside = set_beside(optimizer, engine, self.around.modules_beside())
            engine.attach_optimizer(optimizer, beside=self._others_of(engine, optimizer))
            optimizer = DistOptimizer(optimizer, engine, self._own_clipping(), beside)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return optimizer

    def _others_of(self, engine: Engine, optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
        """The prepared optimizers of `engine` that step none of the parameters of `optimizer`, which replaces the rest."""
        known = [own.optimizer for own in self._optimizers if isinstance(own, DistOptimizer) and own.engine is engine]
        members = [
            m for m in (engine.fragments.members if engine.fragments is not None else ()) if m.optimizer in known
        ]
        new = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [m.optimizer for m in members if not new & m.stands.keys()]

    # ---------------------------------------------------------------------- step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of one microbatch. Reduces the gradients at the end of the accumulation window (`sync_gradients`)."""
        kwargs.pop("learning_rate", None)
        kwargs.pop("scale_wrt_gas", None)
        self.engine.backward(loss / self.gradient_accumulation_steps, scale_wrt_gas=False, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """No backward inside ends the accumulation window. Gradients are the same with or without it, at every stage."""
        before, self._may_reduce = self._may_reduce, False
        try:
            yield
        finally:
            self._may_reduce = before

    def join_uneven_inputs(self, joinables: object, even_batches: bool | None = None) -> object:
        """Refused: a rank without batches cannot take part in the all-gathers that the other ranks' batches need."""
        if not self.state.distributed_type.name.startswith("MULTI_"):  # as in accelerate, which says so
            return super().join_uneven_inputs(joinables, even_batches)
        raise NotImplementedError(
            "join_uneven_inputs: every rank needs the same number of batches when weights are sharded. Leave "
            "even_batches on (accelerate's default), or set drop_last=True in the DataLoader."
        )

    def free_memory(self, *objects: object) -> Any:
        """Like accelerate's: forget all prepared objects. In a custom loop that includes the engines."""
        freed = super().free_memory(*objects)
        if self.around.own_model is None:  # the Trainer calls this and keeps using its model
            self.engines.clear()
            self.frozen.clear()
        return freed

    def prepare_scheduler(self, scheduler: object) -> object:
        """Like accelerate's, but counts data ranks instead of processes."""
        prepared = super().prepare_scheduler(scheduler)
        if self._shares_rows and self._schedulers[-1] is prepared:
            self._schedulers[-1] = prepared = DataRankScheduler.of(prepared, self.mesh.data.size)
        return prepared

    def _prepare_dummy(self, dummy: DummyScheduler, optimizer: object) -> object:
        options = {"step_with_optimizer": self.step_scheduler_with_optimizer, "split_batches": self.split_batches}
        ranks = self.axes.size("data")
        self._schedulers.append(real_scheduler(dummy, self._asked, optimizer, ranks=ranks, options=options))
        return self._schedulers[-1]

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Like accelerate's, for computations outside the model. Casts only with `torch_autocast`."""
        if not self.dist_config.torch_autocast.enabled:
            casts: AbstractContextManager[Any] = super().autocast(autocast_handler)
            return casts
        kwargs = {} if autocast_handler is None else autocast_handler.to_kwargs()
        return torch.autocast(self.device.type, DTYPES[self.dist_config.torch_autocast.dtype], **kwargs)

    # ----------------------------------------------------------------- state

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Full weights on the CPU of the main process, an empty dict elsewhere. Every rank calls it."""
        engine = self.engine_of(model)
        if engine is not None:
            every_rank(self.mesh, "accelerator.get_state_dict()")
            engine.synchronize_replicas()
            return full_state_dict(engine.sharded, keep=self.is_main_process)
        engine = self.engine_containing(model)
        if engine is not None:
            every_rank(self.mesh, "accelerator.get_state_dict()")
            return part_state_dict(engine, model, keep=self.is_main_process)
        return dict(super().get_state_dict(model, unwrap))


show_stock(DistAccelerator, Accelerator)
