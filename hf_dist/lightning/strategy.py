"""`DistStrategy`: the engine under Lightning's Trainer, for `lightning` and `pytorch_lightning`.

    trainer = lightning.Trainer(devices=8, strategy=DistStrategy(config="zero3.json"), gradient_clip_val=1.0)
    trainer.fit(module, loader, ckpt_path="out/last.ckpt")

Lightning calls `training_step` and handles batches, schedules and epochs. The model inside the LightningModule is sharded in
place, and the optimizer's own `step` ends a window of the engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from hf_dist.checkpoint import folder, random_state, resume
from hf_dist.checkpoint.save import SaveRequest
from hf_dist.config import DistConfig, load_config
from hf_dist.dist import collectives
from hf_dist.dist.mesh import join_job
from hf_dist.engine.build import initialize
from hf_dist.engine.engine import Engine
from hf_dist.errors import CheckpointError, ConfigError, ModelError, Problem
from hf_dist.hf.loading import streaming
from hf_dist.hf.model_files import load_weights, read_plan
from hf_dist.hf.peft import inactive_adapters_trainable, refuse_prompt_learning
from hf_dist.lightning.agreement import agreed, part_to_shard
from hf_dist.lightning.packages import imported_package, joined, module_of

__all__ = ["DistStrategy"]

OWN_STATE = "lightning.pt"
"""Lightning's part of a checkpoint folder: loops, callbacks, schedules, hyperparameters."""
_ENGINE = "_hf_dist_engine"
_PRECISIONS = {"32-true": None, "bf16-true": "bf16.enabled", "16-true": "fp16.enabled"}


class DistStrategy:
    """A Lightning strategy that shards the model as the JSON says. See README.md beside this file."""

    strategy_name = "hf_dist"
    lightning_base = "strategies.DDPStrategy"

    # Provided by Lightning's base class.
    accelerator: Any
    cluster_environment: Any
    lightning_module: Any
    lr_scheduler_configs: list[object]
    optimizers: list[torch.optim.Optimizer]
    checkpoint_io: Any
    root_device: torch.device
    num_processes: int
    is_global_zero: bool
    _forward_redirection: Any
    _layer_sync: object
    _package: str
    _timeout: Any

    def __new__(cls, *args: object, package: str | None = None, **kwargs: object) -> DistStrategy:
        """An instance of a class that also derives from Lightning's."""
        own: object = cls
        made: DistStrategy = object.__new__(joined(own, package or imported_package()))
        return made

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, object] | DistConfig,
        *,
        package: str | None = None,
        **kwargs: object,
    ) -> None:
        """`config`: as for `hf_dist.initialize`. `package`: "lightning" or "pytorch_lightning"; by default the one imported.

        Other arguments are those of Lightning's `DDPStrategy` (`timeout`, `cluster_environment`, ...). Raises `ConfigError`.
        """
        self.engine: Engine | None = None
        """Created by `fit`, `validate`, `test` or `predict`."""
        self.config = config if isinstance(config, DistConfig) else load_config(config)
        if self.config.pipeline.stages > 1:
            reason = "is not available in Lightning, whose training_step is one forward and backward"
            fix = "Set it to 1, or train with DistTrainer or engine.train_batch."
            raise ConfigError(Problem("pipeline.stages", str(self.config.pipeline.stages), reason, fix))
        self._precision = joined(_EnginePrecision, self._package)(self)
        super().__init__(**kwargs)

    # ------------------------------------------------------------------ precision

    @property
    def precision_plugin(self) -> Any:
        """hf_dist's own plugin, because the configuration sets the dtype."""
        return self._precision

    @precision_plugin.setter
    def precision_plugin(self, given: object) -> None:
        if given is None:
            return
        asked = str(getattr(given, "precision", type(given).__name__))
        if asked not in _PRECISIONS or type(given).__name__ not in ("Precision", "HalfPrecision"):
            reason = "would work around a model whose dtype the configuration decides"
            fix = (
                'Remove it and write "bf16": {"enabled": true} (or "fp16") into the JSON: fp32 master weights are kept.'
            )
            raise ConfigError(Problem("precision", repr(asked), reason, fix))
        path = _PRECISIONS[asked]
        if path is not None and self.config.value_at(path) is not True:
            if self.config.value_at(path) is False and path in self.config.sources:
                fix = f'Write "{path.split(".")[0]}": {{"enabled": true}} into the JSON, or remove precision=.'
                reason = f"differs from {path} of the configuration, which is false"
                raise ConfigError(Problem("precision", repr(asked), reason, fix))
            self.config = self.config.replaced({path: (True, f"Trainer(precision={asked!r})")})
        self._precision.precision = asked

    # -------------------------------------------------------------------- set-up

    def setup_distributed(self) -> None:
        """Join the job with torchrun's variables; Lightning's launcher does not set RANK for the first process."""
        base: Any = super()
        self.set_world_ranks()  # type: ignore[attr-defined]
        place = self.cluster_environment
        os.environ.update(
            RANK=str(place.global_rank()),
            WORLD_SIZE=str(place.world_size()),
            LOCAL_RANK=str(place.local_rank()),
            LOCAL_WORLD_SIZE=str(self.num_processes),
            MASTER_ADDR=str(place.main_address),
            MASTER_PORT=str(place.main_port),
        )
        join_job(self.root_device, self._timeout)  # Lightning's own would bind the default group to a GPU
        base.setup_distributed()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Around `configure_model`: weights stay on the host, or in their files, until they are sharded."""
        with streaming() if self.config.hf_dist.lazy_load else nullcontext():
            yield

    def setup(self, trainer: Any) -> None:
        """Shard the model and bind the optimizer, once the LightningModule is complete. Every rank calls it."""
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == "fit"
        optimizer = self._optimizer(trainer) if fitting else None
        self.engine = vars(self.lightning_module).get(_ENGINE, self.engine)
        if self.engine is None:
            self.engine = self._build(trainer, optimizer)
            vars(self.lightning_module)[_ENGINE] = self.engine  # for the next Trainer with this module
        elif optimizer is not None:
            self.engine.attach_optimizer(optimizer)
        elif fitting:
            raise ConfigError(
                "the model was sharded before (by validate or another fit), and configure_optimizers gives no optimizer"
            )
        self.lightning_module.to(self.root_device)  # modules beside the sharded model: metrics, a frozen teacher
        if fitting:
            self._take_over_json_objects(self.engine)
        self.setup_precision_plugin()  # type: ignore[attr-defined]

    def _optimizer(self, trainer: object) -> torch.optim.Optimizer | None:
        """The optimizer from `configure_optimizers`; None if it leaves that to the configuration. Raises `ConfigError`."""
        self.setup_optimizers(trainer)  # type: ignore[attr-defined]
        if len(self.optimizers) != 1:
            reason = "optimizers: the engine has one"
            fix = "Use param groups of one optimizer; for a GAN use a loop with DistAccelerator, which takes several models."
            raise ConfigError(Problem("configure_optimizers", str(len(self.optimizers)), reason, fix))
        mock = type(self.optimizers[0]).__name__ == "_MockOptimizer"
        twice = [
            name
            for name, given in (("optimizer", not mock), ("scheduler", bool(self.lr_scheduler_configs)))
            if given and getattr(self.config, name) is not None
        ]
        if twice:
            fix = "Remove it there, or do not return one here."
            raise ConfigError([Problem(name, "", "is given by configure_optimizers, too", fix) for name in twice])
        return None if mock else self.optimizers[0]

    def _take_over_json_objects(self, engine: Engine) -> None:
        """Hand the configuration's optimizer and schedule to Lightning, which steps the schedule."""
        if self.config.optimizer is not None and engine.optimizer is not None:
            self.optimizers = [engine.optimizer]
        if engine.lr_scheduler is not None:
            made = module_of(type(self), "utilities.types").LRSchedulerConfig
            self.lr_scheduler_configs = [made(engine.lr_scheduler, interval="step")]

    def _build(self, trainer: object, optimizer: torch.optim.Optimizer | None) -> Engine:
        if self._layer_sync is not None:
            reason = "has no effect on a sharded model: BatchNorm takes the statistics of the first data rank"
            raise ConfigError(Problem("sync_batchnorm", "True", reason, "Remove it."))
        model = part_to_shard(self.lightning_module)
        refuse_prompt_learning(model)
        with inactive_adapters_trainable(model):
            return initialize(
                model,
                config=agreed(self.config, trainer),
                optimizer=optimizer,
                device=self.root_device,
                timeout=self._timeout,
            )

    def _engine(self) -> Engine:
        if self.engine is None:
            raise ModelError("the model is sharded by trainer.fit, validate, test or predict, which comes first")
        return self.engine

    @property
    def distributed_sampler_kwargs(self) -> dict[str, object]:
        """Give ranks that read the same rows (of a split model or sequence) the same sampler arguments."""
        data = self._engine().mesh.data
        return {"num_replicas": data.size, "rank": data.rank}

    # ---------------------------------------------------------------------- a step

    def training_step(self, *args: object, **kwargs: object) -> object:
        """Run the module's method. If the module itself is sharded, run it inside the module's forward, as in DDP."""
        return self._run("training_step", *args, **kwargs)

    def validation_step(self, *args: object, **kwargs: object) -> object:
        """Like `training_step`."""
        return self._run("validation_step", *args, **kwargs)

    def test_step(self, *args: object, **kwargs: object) -> object:
        """Like `training_step`."""
        return self._run("test_step", *args, **kwargs)

    def predict_step(self, *args: object, **kwargs: object) -> object:
        """Like `training_step`."""
        return self._run("predict_step", *args, **kwargs)

    def _run(self, name: str, *args: object, **kwargs: object) -> object:
        module = self.lightning_module
        if self._engine().model is not module:
            return getattr(super(), name)(*args, **kwargs)
        return self._forward_redirection(module, module, name, *args, **kwargs)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Context for a microbatch that is not the last one before a step."""
        return self._engine().no_sync()

    def reduce(self, tensor: object, group: object = None, reduce_op: object = "mean") -> object:
        """Mean or sum over ranks that read different rows."""
        base: Any = super()
        mesh = self.engine.mesh if self.engine is not None else None
        name = str(reduce_op).rpartition(".")[2].lower().replace("avg", "mean")
        if mesh is None or mesh.data.size == mesh.world.size or group is not None or name not in ("mean", "sum"):
            return base.reduce(tensor, group, reduce_op)
        if not isinstance(tensor, torch.Tensor):
            return tensor
        total = tensor.to(torch.float64 if tensor.dtype.is_floating_point else tensor.dtype).clone()
        collectives.all_reduce(mesh.data, total, op="sum").wait()
        return (total / mesh.data.size if name == "mean" else total).to(tensor.dtype)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or, with `all=False`, any rank) agree."""
        if self.engine is None:
            return bool(super().reduce_boolean_decision(decision, all))  # type: ignore[misc]
        said = collectives.all_gather_object(self.engine.mesh.control, bool(decision))
        return sum(said) == len(said) if all else any(said)

    # ---------------------------------------------------------------- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: checkpoints are read into shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: the engine restores the optimizer."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: weights are written from shards to files."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Empty: the engine writes the optimizer state."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, object], strict: bool = True) -> None:
        """Nothing to do: `load_checkpoint` loaded the weights."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, object]) -> None:
        """Nothing to do: `load_checkpoint` loaded the state."""

    def save_checkpoint(self, checkpoint: dict[str, object], filepath: object, storage_options: object = None) -> None:
        """Write a folder that `from_pretrained` loads, with training state and Lightning's own state. Every rank calls it.

        `save_weights_only=True` omits the training state. Raises `CheckpointError` on every rank.
        """
        engine = self._engine()
        final = Path(collectives.broadcast_object(engine.mesh.control, str(filepath)))
        own = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        engine.sharded.take_writes()
        engine.writer.save(
            engine,
            SaveRequest(
                final=final,
                files=engine.model_files(),
                write_more_files=lambda working: self.checkpoint_io.save_checkpoint(own, working / OWN_STATE),
                facts={"step": engine.global_steps, "layout": engine.layout_facts()},
                own_values=random_state.capture(),
                training_state="optimizer_states" in checkpoint,
            ),
        )

    def load_checkpoint(self, checkpoint_path: object, weights_only: bool | None = None) -> dict[str, Any]:
        """Load everything for `fit`, only weights otherwise. Returns Lightning's own state. Every rank calls it."""
        engine = self._engine()
        directory = Path(collectives.broadcast_object(engine.mesh.control, str(checkpoint_path)))
        engine.writer.wait()
        if not (directory / OWN_STATE).is_file():
            raise CheckpointError(
                f"{directory} holds no {OWN_STATE}: it is not a folder that DistStrategy has saved. Weights alone are loaded "
                "by from_pretrained in configure_model."
            )
        plan = read_plan(directory)
        if self.lightning_module.trainer.state.fn == "fit":
            engine.load_checkpoint(directory)
        elif (directory / folder.STATE).is_dir():
            resume.load_whole_checkpoint(engine, directory, weights_only=True)
        elif plan is not None:
            load_weights(engine, directory, plan)
        read = self.checkpoint_io.load_checkpoint(directory / OWN_STATE, weights_only=weights_only)
        return {"state_dict": {}, **read}

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a folder once its replacement is complete. Every rank calls it."""
        self._engine().writer.wait()
        if self.is_global_zero:
            folder.remove(Path(filepath))

    def on_train_end(self) -> None:
        """Wait for a running background save."""
        self._engine().writer.wait()

    def teardown(self) -> None:
        """Lightning's, except that the model stays on its device and WORLD_SIZE stays set for the rest of the job."""
        world = os.environ.get("WORLD_SIZE")
        for part in (self.precision_plugin, self.accelerator, self.cluster_environment, self.checkpoint_io):
            part.teardown()
        if world is not None:
            os.environ["WORLD_SIZE"] = world


class _EnginePrecision:
    """The engine's backward, step and clipping, called where Lightning calls its precision plugin."""

    precision = "32-true"
    lightning_base = "plugins.precision.Precision"

    def __init__(self, strategy: DistStrategy) -> None:
        self._strategy = strategy
        super().__init__()

    def backward(self, tensor: torch.Tensor, model: object, optimizer: object, *args: object, **kwargs: object) -> None:
        retain = bool(kwargs.pop("retain_graph", False))
        if args or kwargs:
            raise NotImplementedError(f"backward arguments {[*args, *kwargs]}: only retain_graph is available")
        # Lightning has already divided it by the number of microbatches.
        self._strategy._engine().backward(tensor, scale_wrt_gas=False, retain_graph=retain)

    def optimizer_step(self, optimizer: object, model: object, closure: object, **kwargs: object) -> object:
        window = self._strategy._engine().window
        with window.announce(True):
            result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)  # type: ignore[misc]
        # Lightning's wrapper was made before the engine, so its `zero_grad` is torch's: nobody hears of it.
        window.abandon()
        return result

    def clip_grad_by_value(self, optimizer: object, clip_val: float) -> None:
        self._strategy._engine().clip_grad_value(float(clip_val))

    def clip_grad_by_norm(self, optimizer: object, clip_val: float) -> None:
        self._strategy._engine().clip_grad_norm(float(clip_val))
