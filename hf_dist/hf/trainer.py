"""`DistTrainer`: the HF Trainer with 36 of its methods overridden, in nine classes. Loop, loss and logging stay HF's."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import Trainer, trainer_pt_utils

from hf_dist.checkpoint.unwritable import make_folder
from hf_dist.config import AutoSources, DistConfig, hidden_size_of, resolve
from hf_dist.config.curriculum import length_at
from hf_dist.dist.collective_guard import every_rank
from hf_dist.engine.unprepare import unprepare
from hf_dist.errors import ConfigError, ModelError, Problem
from hf_dist.hf.accelerator import DistAccelerator
from hf_dist.hf.agreed_control import AgreedControlMixin
from hf_dist.hf.args import DistArgsMixin
from hf_dist.hf.callbacks import default_callbacks
from hf_dist.hf.callbacks.console import show_records
from hf_dist.hf.checkpointing import CheckpointingMixin
from hf_dist.hf.comm_hook import with_comm_hook
from hf_dist.hf.counts import parameter_count
from hf_dist.hf.curriculum import cut_batches
from hf_dist.hf.data import loaders_left, without_repeated_rows
from hf_dist.hf.distributed_config import asked_layout
from hf_dist.hf.evaluation import (
    compares_rows,
    each_batch_by_itself,
    gathers_by_itself,
    inputs_of_all_ranks,
    on_rows_of_the_set,
    rows_of_a_rank,
)
from hf_dist.hf.model_card import ModelCardMixin
from hf_dist.hf.pipeline import PipelineMixin
from hf_dist.hf.repeated_trainings import RepeatedTrainingsMixin, counted
from hf_dist.hf.replicas import ReplicasMixin
from hf_dist.hf.signatures import show_stock
from hf_dist.hf.training_loop import LoopOfTrainer
from hf_dist.hf.trl import TrlMixin
from hf_dist.hf.window_loss import WindowLoss, tell_router_loss
from hf_dist.log import warn_once
from hf_dist.optim.build import optimizer_for
from hf_dist.optim.schedules import build_scheduler
from hf_dist.planning.out_of_memory import explained, shape_of
from hf_dist.sharding.wrapped import refuse_wrapped
from hf_dist.tensors import pytree


class DistTrainerMixin(
    RepeatedTrainingsMixin,
    AgreedControlMixin,
    CheckpointingMixin,
    ReplicasMixin,
    PipelineMixin,
    TrlMixin,
    ModelCardMixin,
):
    """First in the bases of any Trainer: `class MyTrainer(DistTrainerMixin, SFTTrainer)`.

    Active if the arguments carry a config (`dist_config=`, `deepspeed=`, HF_DIST_CONFIG). Otherwise it behaves like its base.
    """

    args: Any
    model: Any
    accelerator: Any
    state: Any
    add_callback: Callable[..., None]
    _last_shape: Any = None
    _draws_alike = False

    @functools.cached_property
    def _window_loss(self) -> WindowLoss:
        return WindowLoss()

    @property
    def dist(self) -> DistConfig | None:
        """The configuration, None when hf_dist is off."""
        return getattr(self.args, "dist", None)

    # -------------------------------------------------------------------- set-up

    def create_accelerator_and_postprocess(self) -> None:
        """HF creates its accelerator and this adopts it, so references that other objects took to it stay valid."""
        layout = asked_layout(self.model)
        if layout is not None and isinstance(self.args, DistArgsMixin):
            self.args.follow(layout)
        if self.dist is not None and self.model is not None:
            refuse_wrapped(self.model)  # here, because HF refuses settings of such a model that are not to blame
        super().create_accelerator_and_postprocess()
        if self.dist is None:
            if isinstance(self.args, DistArgsMixin) and self.accelerator.num_processes > 1:
                warn_once(
                    f"{type(self.args).__name__} has no config (dist_config, deepspeed, HF_DIST_CONFIG): the model is trained "
                    "by plain data parallelism, as with the stock Trainer"
                )
            return
        # Of a subclass that makes the accelerator itself: TrainingArguments have no hook.
        asked = with_comm_hook(self.dist, [self.accelerator.ddp_handler])
        config = resolve(asked, self._auto_sources())
        DistAccelerator.adopt(self.accelerator, config, LoopOfTrainer(self))
        if self.args.should_save:  # as HF does later, with a bare error
            make_folder(self.args.output_dir, "output_dir")
        self._gather_predictions()

    def _gather_predictions(self) -> None:
        """Let the adopted accelerator gather predictions, because it drops repeated samples."""
        self.gather_function: Any = self.accelerator.gather_for_metrics
        if "use_gather_object" in inspect.signature(self.gather_function).parameters:
            self.gather_function = functools.partial(
                self.gather_function, use_gather_object=self.args.eval_use_gather_object
            )

    def _loss_of_example(self, model: nn.Module, batch: Mapping[str, object]) -> object:
        """The loss as `training_step` computes it, to learn how training calls the model."""
        counts = (
            getattr(self, "model_accepts_loss_kwargs", False) or getattr(self, "compute_loss_func", None) is not None
        )
        number = torch.tensor(7) if counts else None
        with self._not_counted():
            return self.compute_loss(model, pytree.copied(batch), num_items_in_batch=number)

    def _auto_sources(self, num_training_steps: int | None = None) -> AutoSources:
        assert self.dist is not None
        width = hidden_size_of(getattr(self.model, "config", None))
        sources = AutoSources.from_training_arguments(
            self.args, data_world_size=self.args.world_size, hidden_size=width, num_training_steps=num_training_steps
        )
        # Settled when the arguments were created; `--bf16` there and "bf16" here mean the same.
        return AutoSources(**{**vars(sources), "bf16": None, "fp16": None})

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Show the base Trainer's arguments, because libraries read the signature to tell old Trainers from new ones."""
        super().__init_subclass__(**kwargs)
        if "__init__" not in vars(cls):
            cls.__init__ = _like_stock(cls)  # type: ignore[method-assign]

    if not TYPE_CHECKING:  # editors show the next class's arguments; who asks the class gets them from `_like_stock`

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            if self.dist is not None:
                _refuse_smoothing_by_ranks(self)
                show_records(self.callback_handler.callbacks)
                for callback in default_callbacks(self):
                    self.add_callback(callback)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Skipped before sharding, because a whole model may not fit the device."""
        if self.dist is None:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The JSON's optimizer if it has one (all parameters in one group, as DeepSpeed does), else HF's."""
        current = getattr(self, "optimizer", None)
        if self.dist is not None and current is None and self.dist_engine is None:
            unprepare(self.model)  # parts that an earlier Trainer cut into stages lack parameters
            _refuse_frozen([self.model, *LoopOfTrainer(self).modules_beside()])
        if self.dist is None or self.dist.optimizer is None or current is not None:
            return super().create_optimizer() if model is None else super().create_optimizer(model)  # type: ignore[misc]
        section = self.dist.optimizer
        self.optimizer: Any = optimizer_for(self.model, section.type, section.params)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The JSON's schedule if it has one, else HF's."""
        if self.dist is None or self.dist.scheduler is None:
            return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
        config = resolve(self.dist, self._auto_sources(num_training_steps))
        assert config.scheduler is not None
        optimizer = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler: Any = build_scheduler(config.scheduler.type, config.scheduler.params, optimizer)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: object, **kwargs: object) -> Any:
        """HF's. `resume_from_checkpoint`: a path, True (the newest complete checkpoint of the output folder), or "auto" (the
        same, but starts fresh when there is none, so that a restarted job continues by itself)."""
        self._draw_alike()
        trial = kwargs.get("trial", args[0] if args else None)
        with (
            explained(lambda: self.dist_engine, lambda: self._last_shape),  # outside: auto_find_batch_size has given up
            contextlib.nullcontext() if self.dist is None else loaders_left(self.accelerator.gradient_state),
            counted(self.args, processes=False),  # a search counts processes
        ):
            self._learn_who_asks()
            with self._checkpoints_of_training(resume_from_checkpoint, trial) as found:
                self._drop_microbatches()
                self._let_callbacks_work()
                return super().train(found, *args, **kwargs)  # type: ignore[misc]

    def _get_train_sampler(self, *args: object, **kwargs: object) -> Any:
        """HF's. One that divides rows among ranks itself is given this rank's place among those that read different rows: HF
        takes `world_size`, which counts them, together with `process_index`, which counts processes."""
        sampler = super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]
        divides = getattr(trainer_pt_utils, "BatchRebalanceSampler", ())  # older transformers have none
        if self.dist is not None and isinstance(sampler, divides):
            sampler.rank = self.accelerator.process_index
        return sampler

    def get_batch_samples(self, epoch_iterator: Any, *args: object, **kwargs: object) -> Any:
        """HF's, on batches that `curriculum_learning` has cut to the length of this step."""
        if self.dist is not None and self.dist.curriculum_learning.enabled:
            length = length_at(self.dist.curriculum_learning, self.state.global_step)
            epoch_iterator = cut_batches(epoch_iterator, length)
        window, items = super().get_batch_samples(epoch_iterator, *args, **kwargs)
        with self._in_replica():
            self._window_loss.count(self, window)
        return window, items

    def _draw_alike(self) -> None:
        """Run once: TRL's GRPO seeds each process differently, so ranks that share rows would sample different tokens."""
        if self.dist is not None and not self._draws_alike:
            self._draws_alike = True
            self.accelerator.draw_alike()

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """HF's, after a check whether the model's loss really is a sum over `num_items_in_batch`."""
        self._last_shape = shape_of(inputs)
        with self._in_replica():
            tell_router_loss(self, getattr(self, "current_gradient_accumulation_steps", 1))
        self._settle_loss(model, inputs)
        self._leave_if_told()
        with self._in_replica():  # HF multiplies a loss over those items by the number of processes
            loss = self._over_stages(super().training_step, model, inputs, num_items_in_batch)  # type: ignore[misc]
        return self._for_the_log(loss)

    def _for_the_log(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss that is nan or inf counts in the log like the average of those before, as in HF's loop, without a wait."""
        so_far = getattr(self, "_tr_loss", None)  # where this transformers keeps it
        if self.dist is None or not self.args.filters_on_device or so_far is None:
            return loss
        average = so_far / (1 + self.state.global_step - self._globalstep_last_logged)  # type: ignore[attr-defined]
        return torch.where(loss.isfinite(), loss, average.to(loss.device, loss.dtype))

    def get_num_trainable_parameters(self) -> int:
        """HF's, of the whole model."""
        return parameter_count(self.model, trainable_only=True)

    def floating_point_ops(self, inputs: Any) -> Any:
        """HF's, divided over the ranks that compute these rows together, because `store_flos` sums over all ranks."""
        engine = self.dist_engine
        operations = super().floating_point_ops(inputs)  # type: ignore[misc]
        return (
            operations
            if engine is None
            else operations / (engine.mesh.tp.size * engine.mesh.cp.size * engine.mesh.pp.size)
        )

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: object, **kwargs: object
    ) -> Any:
        """HF's, after the same check, because HF multiplies the loss by the number of ranks in evaluation, too."""
        tell_router_loss(self, 1)
        self._settle_loss(model, inputs)
        stock = super().prediction_step  # type: ignore[misc]

        def step(rows: object) -> object:
            self._leave_evaluation_if_told()
            return self._evaluated_over_stages(stock, model, rows, prediction_loss_only, *args, **kwargs)

        if self.dist is None:
            return step(inputs)
        with self._only_loss_is_read() if prediction_loss_only else contextlib.nullcontext():
            if gathers_by_itself(getattr(self, "loss", None)):
                return step(inputs)
            return on_rows_of_the_set(self.accelerator, inputs, step)

    def _only_loss_is_read(self) -> AbstractContextManager[None]:
        """Inside, evaluation forwards whose logits are not needed."""
        tiled = self.accelerator.engine.tiled_loss if self.dist is not None else None
        return contextlib.nullcontext() if tiled is None else tiled.only_loss_is_read()

    def _settle_loss(self, model: nn.Module, inputs: Any) -> None:
        with self._only_loss_is_read():
            self._window_loss.settle(self, model, inputs)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """HF's. In training, losses of all kinds are weighted as one process weights the rows of a batch."""

        def stock(num_items: Any) -> Any:
            return super(DistTrainerMixin, self).compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs, num_items_in_batch=num_items
            )

        if self.dist is None or not model.training:
            return stock(num_items_in_batch)
        return self._window_loss.of_microbatch(self, stock, inputs, num_items_in_batch)

    def evaluation_loop(self, *args: object, **kwargs: object) -> Any:
        """As HF's, but each sample counts once and the loss equals that of one process, on any number of ranks.

        Skips the cast of `bf16_full_eval`, because the engine already computes in that dtype.
        """
        if self.dist is None:
            return super().evaluation_loop(*args, **kwargs)
        description = kwargs.get("description", args[1] if len(args) > 1 else "")
        loader = kwargs["dataloader"] if "dataloader" in kwargs else args[0]
        every_rank(self.accelerator.mesh, f"trainer.{'predict' if description == 'Prediction' else 'evaluate'}()")
        self._draw_alike()
        if self.accelerator._models and self.accelerator.engine_of(self.model) is None:
            # HF prepares the model only if no model was prepared, and TRL has prepared its reference model.
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        self._gather_predictions()  # Seq2SeqTrainer has just chosen a gather that keeps repeated samples
        asked = self.args
        saved = (asked.bf16_full_eval, asked.fp16_full_eval, asked.logging_nan_inf_filter)
        asked.bf16_full_eval = asked.fp16_full_eval = False
        asked.logging_nan_inf_filter |= asked.filters_on_device  # losses are on the host here
        try:
            with (
                each_batch_by_itself(self.args),
                rows_of_a_rank(self.args, self.accelerator),
                contextlib.nullcontext() if compares_rows(self) else without_repeated_rows(loader),
                inputs_of_all_ranks(self),
            ):
                return super().evaluation_loop(*args, **kwargs)
        finally:
            asked.bf16_full_eval, asked.fp16_full_eval, asked.logging_nan_inf_filter = saved
            # HF subtracts it from the time of every later evaluation, too, so their speed would be negative.
            self.__dict__.pop("model_preparation_time", None)
            self._forget_loader(loader)

    def _forget_loader(self, loader: object) -> None:
        """Let a loader go that HF makes for one evaluation: accelerate lists it for ever, with the random states it keeps."""
        if (
            loader not in getattr(self, "_eval_dataloaders", {}).values()
            and loader is not self.callback_handler.train_dataloader
        ):
            self.accelerator._dataloaders[:] = [known for known in self.accelerator._dataloaders if known is not loader]


def _refuse_frozen(modules: list[nn.Module]) -> None:
    """Raise `ModelError` before the first step if there is nothing to train. Local."""
    if not any(p.requires_grad for module in modules for p in module.parameters()):
        raise ModelError(
            f"no parameter of {type(modules[0]).__name__} requires grad: nothing would be trained. Unfreeze some "
            "(requires_grad_(True)), add an adapter, or call trainer.evaluate() instead."
        )


def _refuse_smoothing_by_ranks(trainer: Any) -> None:
    """Raise `ConfigError` where HF's label smoother takes a microbatch's mean for that of the batch: before transformers 5.15
    it was not told the number of items, and the Trainer multiplied the mean by the ranks."""
    smoother, args = trainer.label_smoother, trainer.args
    several = trainer.accelerator.num_processes > 1 or args.gradient_accumulation_steps > 1
    if smoother is not None and several and "num_items_in_batch" not in inspect.signature(smoother.__call__).parameters:
        raise ConfigError(
            Problem(
                "label_smoothing_factor",
                str(args.label_smoothing_factor),
                f"gives wrong losses with several ranks or microbatches in transformers {transformers.__version__}",
                "pip install 'transformers>=5.15', or set it to 0.",
            )
        )


def _like_stock(cls: Any) -> Any:
    """An `__init__` of `cls` that calls the next one, with the signature of the first base that is not the mixin."""
    inits = (vars(base).get("__init__") for base in cls.__mro__[1:])
    stock = next(init for init in inits if init is not None and init is not DistTrainerMixin.__init__)

    @functools.wraps(stock)
    def __init__(self: object, *args: object, **kwargs: object) -> None:
        super(cls, self).__init__(*args, **kwargs)

    return __init__


class DistTrainer(DistTrainerMixin, Trainer):
    """`transformers.Trainer`, sharded as `DistTrainingArguments.dist_config` says."""


show_stock(DistTrainerMixin, Trainer)
