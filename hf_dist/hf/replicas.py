"""The Trainer over replicas that train alone (`local_sgd`): how it counts, logs, evaluates, saves and handles signals.

token counts and their loss factor       those of the replica
training log                             the mean over rank 0's replica, or over this job if it is a replica of a server
training rows                            a share for each replica
evaluation, checkpoints                  wait for the next meeting of the replicas; the last step is a meeting
signals                                  checked at meetings
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hf_dist.dist import collectives
from hf_dist.engine.engine import Engine
from hf_dist.hf.stop_signal import StopSignal
from hf_dist.log import say_once
from hf_dist.parallel.local_sgd.outer import OuterOptimizer
from hf_dist.parallel.local_sgd.served import ServedOuter

__all__ = ["ReplicasMixin"]


class ReplicasMixin:
    """Overrides of the Trainer for `local_sgd`; part of `DistTrainerMixin`."""

    args: Any
    state: Any
    control: Any
    accelerator: Any
    _stop: StopSignal | None
    _due: tuple[bool, bool] = (False, False)
    """Whether an evaluation, and a save, are waiting for a meeting."""
    _asked_at = -1
    _logs_replica = False

    @property
    def outer(self) -> OuterOptimizer | None:
        """Averages the replicas that are ranks of this job; None where all ranks train together."""
        engine: Engine | None = self.dist_engine  # type: ignore[attr-defined]
        return None if engine is None else engine.replicas_here

    def get_train_dataloader(self) -> Any:
        """HF's; a replica that is a job of its own reads its share of the rows."""
        dist = self.accelerator.dist_config if self.dist is not None else None  # type: ignore[attr-defined]
        with self.accelerator.shared_by_replicas() if dist is not None else nullcontext():
            return super().get_train_dataloader()  # type: ignore[misc]

    def _in_replica(self) -> AbstractContextManager[None]:
        """Inside, the accelerator gathers within the replica and counts only its processes."""
        replica: AbstractContextManager[None] = nullcontext()
        if self.outer is not None:
            replica = self.accelerator.in_replica()
        return replica

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> object:
        """HF's, which counts the items of the window; here within the replica."""
        with self._in_replica():
            return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: object) -> None:
        """HF's, as if all replicas had as many tokens."""
        before = self.state.num_input_tokens_seen
        with self._in_replica():
            super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        if self.outer is not None:
            self.state.num_input_tokens_seen += (self.state.num_input_tokens_seen - before) * (self.outer.axis.size - 1)

    def store_flos(self) -> None:
        """HF's, summed over all ranks. A log between two meetings leaves the sum to the next save."""
        if not self._logs_replica:
            super().store_flos()  # type: ignore[misc]

    # ------------------------------------------------------- what happens at a step

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: object, **kwargs: object) -> None:
        """HF's, in two parts: the replica's log now, evaluation and save once the replicas have met."""
        engine: Engine | None = self.dist_engine  # type: ignore[attr-defined]
        if engine is None or engine.outer is None:
            super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)  # type: ignore[misc]
            return
        asks = any(self._due) or self.control.should_evaluate or self.control.should_save
        if self.control.should_training_stop or (asks and engine.outer.interval_ended):
            engine.synchronize_replicas()
        self._postpone(engine.outer)
        wanted = self.control.should_evaluate, self.control.should_save
        if self.control.should_log and self.outer is not None:
            self.control.should_evaluate = self.control.should_save = False
            mean = tr_loss.detach().clone()
            collectives.all_reduce(engine.mesh.dp, mean).wait()
            with self._only_own_replica():
                super()._maybe_log_save_evaluate(mean, *args, **kwargs)  # type: ignore[misc]
            if self.state.global_step == self._globalstep_last_logged:  # type: ignore[attr-defined]
                tr_loss.zero_()
            self.control.should_evaluate, self.control.should_save = wanted
            self.control.should_log = False
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)  # type: ignore[misc]
        if self.control.should_training_stop and isinstance(engine.outer, ServedOuter):
            engine.outer.rest()

    @contextmanager
    def _only_own_replica(self) -> Iterator[None]:
        """Inside, HF's helpers that gather over the whole job treat this process as the only one."""
        self._logs_replica = self.args.speaks_alone = True
        try:
            yield
        finally:
            self._logs_replica = self.args.speaks_alone = False

    def _postpone(self, outer: OuterOptimizer | ServedOuter) -> None:
        """Postpone evaluations and saves requested between two meetings to the next meeting. Local."""
        met = outer.met
        evaluates = self._due[0] or self.control.should_evaluate
        saves = self._due[1] or self.control.should_save
        self._due = (False, False) if met else (evaluates, saves)
        self.control.should_evaluate, self.control.should_save = (evaluates, saves) if met else (False, False)
        if any(self._due):
            say_once(
                "local_sgd: replicas differ between two meetings, so evaluations and checkpoints wait for the next one "
                f"(every {outer.every} steps)"
            )

    def _told(self, in_evaluation: bool) -> int:
        """The signal that some rank received; 0 for none. Collective over all ranks; with replicas only at meetings.

        At a meeting it waits for the answer, because the next check is a whole interval away. All ranks evaluate together.
        """
        if self._stop is None:
            return 0
        outer = self.outer
        if outer is None or in_evaluation:
            return self._stop.agreed()
        if not outer.interval_ended or self._asked_at == self.state.global_step:
            return 0
        self._asked_at = self.state.global_step
        self._stop.agreed()
        return self._stop.agreed()
