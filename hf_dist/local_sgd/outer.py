"""The outer step: what the replicas of a sharded model moved since they met last, averaged, and stepped by an SGD of its own.

    pseudo-gradient = anchor - weights              of this replica, in fp32; the anchor is what all had when they met last
    anchor         -= outer_lr * SGD(mean over the replicas)
    weights         = anchor

With a rate of 1 and no momentum that is the mean of the weights: then there is neither anchor nor state, and the weights
themselves travel. Fragments may do it in turn, and beside training (`turns.py`):

    weights         = mix * weights + (1 - mix) * anchor        some steps after the pseudo-gradient was taken

Sources: local SGD, Stich 2018 (arXiv 1805.09767); DiLoCo, Douillard et al. 2023 (arXiv 2311.08105); in turns, arXiv 2501.18512.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch

from hf_dist import collectives
from hf_dist.collectives import Handle
from hf_dist.config.training_sections import LocalSgdConfig
from hf_dist.errors import ModelError
from hf_dist.local_sgd.turns import Turns
from hf_dist.mesh import MeshAxis
from hf_dist.offload.host import sent
from hf_dist.offload.resting import Resting, Tier, opened
from hf_dist.optim.loss_scale import DynamicLossScaler
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.precision import MASTER_DTYPE
from hf_dist.sharding.runtime import ShardedModel

__all__ = ["GroupMotion", "OuterOptimizer", "num_outer_states", "refuse_other_weights"]

MAX_IN_FLIGHT = 2
"""Groups whose pseudo-gradients are on their way at once, as with gradients."""


class GroupMotion:
    """What this rank knows of one group beside its weights: where all replicas stood, and the outer momentum."""

    def __init__(self, group: FlatGroup, config: LocalSgdConfig) -> None:
        self.group = group
        self._rate, self._factor, self._nesterov = config.outer_lr, config.outer_momentum, config.nesterov
        numel, tier = group.resting[1] - group.resting[0], group.master.tier
        shelf = group.storage.optim
        self.anchor: Resting | None = shelf.new(numel, MASTER_DTYPE, tier) if has_anchor(config) else None
        self.momentum: Resting | None = shelf.new(numel, MASTER_DTYPE, tier) if config.outer_momentum else None

    @torch.no_grad()
    def begin(self) -> None:
        """The anchor is what the weights are now. Local."""
        if self.anchor is not None:
            with opened(self.group.master) as masters, opened(self.anchor, changed=True) as anchor:
                anchor.copy_(masters)

    @torch.no_grad()
    def outgoing(self) -> torch.Tensor:
        """What is averaged, 1-D, a copy on the device. Local."""
        if self.anchor is None:
            return self.weights()
        self.group.master.settle()  # a step may still be writing it
        with opened(self.group.master) as masters, opened(self.anchor) as anchor:
            return sent(anchor - masters, self.group.mesh.device)

    @torch.no_grad()
    def incoming(self, mean: torch.Tensor, mix: float = 0.0) -> None:
        """Step the anchor by the mean of `outgoing` over the replicas, and go on from there. Local.

        `mix`: the share of this replica's weights that stays as it is.
        """
        self.group.master.settle()  # steps may have been made since it was sent
        with opened(self.group.master, changed=True) as masters:
            mean = mean.to(masters.device)
            if self.anchor is None:
                _become(masters, mean, mix)
            else:
                if self.momentum is not None:
                    with opened(self.momentum, changed=True) as momentum:
                        momentum.mul_(self._factor).add_(mean)
                        mean = mean.add_(momentum, alpha=self._factor) if self._nesterov else momentum.clone()
                with opened(self.anchor, changed=True) as anchor:
                    _become(masters, anchor.sub_(mean, alpha=self._rate), mix)
        self.group.masters_changed()

    @torch.no_grad()
    def weights(self) -> torch.Tensor:
        """The master weights, 1-D, a copy on the device. Local."""
        self.group.master.settle()
        with opened(self.group.master) as masters:
            return sent(masters.clone(), self.group.mesh.device)

    @torch.no_grad()
    def become(self, weights: torch.Tensor) -> None:
        """The master weights are these from now on; anchor and momentum stay. Local."""
        with opened(self.group.master, changed=True) as masters:
            masters.copy_(weights)
        self.group.masters_changed()

    def resident_nbytes(self) -> dict[Tier, int]:
        """Bytes of anchor and momentum at rest, by kind of memory."""
        held = dict.fromkeys(Tier, 0)
        for state in (self.anchor, self.momentum):
            if state is not None:
                held[state.tier] += state.nbytes
        return held


def _become(masters: torch.Tensor, values: torch.Tensor, mix: float) -> None:
    """`masters` = mix * masters + (1 - mix) * values, in place."""
    masters.copy_(values if not mix else torch.lerp(values, masters.to(values.dtype), mix))


def num_outer_states(config: LocalSgdConfig) -> int:
    """fp32 tensors that a rank of several replicas keeps beside its master weights."""
    return has_anchor(config) + (config.outer_momentum > 0) if config.enabled else 0


def has_anchor(config: LocalSgdConfig) -> bool:
    """Whether replicas remember where they met; the plain mean of the weights needs no memory."""
    return config.outer_lr != 1 or config.outer_momentum > 0


def refuse_other_weights(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ModelError` for an optimizer that keeps other weights for evaluation: replicas agree on those they train."""
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ModelError(
            f"{type(optimizer).__name__} keeps other weights for evaluation than for training (`eval()`, `train()`), and "
            'replicas that train alone ("local_sgd") would agree on the latter only. Use an optimizer without them, such as '
            '"AdamW", or remove "local_sgd"'
        )


class OuterOptimizer:
    """Lets the replicas of one model meet every so many steps. Every rank has one and makes the same calls."""

    def __init__(self, sharded: ShardedModel, config: LocalSgdConfig) -> None:
        """Local. The replicas are equal when it is made, and whenever weights are loaded."""
        assert sharded.mesh.replicas is not None
        self.axis: MeshAxis = sharded.mesh.replicas
        self.every = config.every
        """Optimizer steps between two meetings; 0: whoever calls `meet` counts."""
        self.met = True
        """Whether no step was made since the replicas met last: what is saved or evaluated is all of them then."""
        self.interval_ended = True
        """Whether the last step is one of every `every`-th: where the job may ask something of all replicas."""
        self._anchored = False
        self.sharded = sharded
        self.motions = [GroupMotion(group, config) for group in sharded.trainable_groups]
        self.turns = Turns(config, len(sharded.units))
        self._mix = config.mix
        of_group = {id(motion.group): motion for motion in self.motions}
        self._fragments = [
            [of_group[id(group)] for unit in units for group in sharded.units[unit].groups if id(group) in of_group]
            for units in self.turns.units
        ]

    def before_backward(self) -> None:
        """A backward begins: the first one after a meeting finds what all replicas have, with writes of user code. Local."""
        if self.met and not self._anchored:
            self._anchored = True
            self.sharded.take_writes()
            for motion in self.motions:
                motion.begin()

    def after_step(self, number: int, scaler: DynamicLossScaler | None) -> bool:
        """Step `number` was made, or skipped, which counts too: all replicas meet at the same one. Whether weights changed.

        Collective over the replicas at every `every`-th step, or where a fragment has its turn, else local.
        """
        self.met = False
        self.interval_ended = bool(self.every) and number % self.every == 0
        if self.every and self.turns.streams:
            return self._take_turns(number)
        if self.interval_ended:
            self.meet(scaler)
        return self.interval_ended

    def _take_turns(self, number: int) -> bool:
        starting = list(self.turns.starting(number))
        if starting or self.turns.is_due(number):
            self._let_masters_rest()
        for fragment in starting:
            for motion in self._fragments[fragment]:
                if motion.group.layout.numel:
                    self.turns.add(number, self._start(motion, motion.outgoing, self._mixed(motion)))
        return self.turns.take_up(number)

    def _mixed(self, motion: GroupMotion) -> Callable[[torch.Tensor], None]:
        return lambda mean: motion.incoming(mean, self._mix)

    def meet(self, scaler: DynamicLossScaler | None) -> None:
        """All replicas have the same weights after it; follow with `weights_changed()`. Collective over the replicas.

        It is the outer step. Where fragments have theirs in turn, it is the mean of the weights: that changes nothing of
        what the replicas moved on average, so anchors stay, and the next outer steps are those that would have been.
        """
        self._let_masters_rest()
        self.turns.take_up()
        in_turn = bool(self.every) and self.turns.streams
        in_flight: deque[Callable[[], None]] = deque()
        for motion in self.motions:
            if not motion.group.layout.numel:
                continue
            if len(in_flight) >= MAX_IN_FLIGHT:
                in_flight.popleft()()
            if in_turn:
                in_flight.append(self._start(motion, motion.weights, motion.become))
            else:
                in_flight.append(self._start(motion, motion.outgoing, motion.incoming))
        while in_flight:
            in_flight.popleft()()
        self.sharded.passes.buffers.share(self.axis)
        if scaler is not None and scaler.dynamic:
            self._agree_on_scale(scaler)
        self.met, self.interval_ended, self._anchored = True, True, in_turn

    def _let_masters_rest(self) -> None:
        if self.sharded.mesh.device.type == "cuda":  # masters on the host may still be on their way to it
            torch.cuda.synchronize(self.sharded.mesh.device)

    def _start(
        self, motion: GroupMotion, outgoing: Callable[[], torch.Tensor], incoming: Callable[[torch.Tensor], None]
    ) -> Callable[[], None]:
        values = outgoing()
        handle: Handle = collectives.all_reduce(self.axis, values)

        def take_up() -> None:
            handle.wait()
            incoming(values)

        return take_up

    def _agree_on_scale(self, scaler: DynamicLossScaler) -> None:
        """All go on with the loss scale of the replica that has the smallest. Each has moved its own since they met."""
        state = scaler.state_dict()
        rows = torch.zeros(self.axis.size, len(state), dtype=torch.float64)
        rows[self.axis.rank] = torch.tensor([float(value) for value in state.values()])
        flat = sent(rows.view(-1), self.sharded.mesh.device)
        collectives.all_gather(self.axis, flat).wait()
        everyone = flat.view(rows.shape).tolist()
        smallest = min(everyone, key=lambda row: row[0])
        scaler.load_state_dict(dict(zip(state, smallest, strict=True)))

    def before_load(self) -> None:
        """Other weights take the place of these: what is on its way is for nobody. Collective over the replicas."""
        self.turns.take_up()
        self._anchored = False

    def restart(self) -> None:
        """All replicas have the same weights: they have loaded them. Local."""
        self.met = self.interval_ended = True

    def anchors_loaded(self) -> None:
        """The anchors are those of a checkpoint, and not the weights. Local."""
        self._anchored = True

    def resident_nbytes(self) -> dict[Tier, int]:
        """Bytes of anchors and momenta at rest, by kind of memory."""
        held = dict.fromkeys(Tier, 0)
        for motion in self.motions:
            for tier, nbytes in motion.resident_nbytes().items():
                held[tier] += nbytes
        return held

    def states(self) -> Iterator[tuple[str, FlatGroup, Resting]]:
        """(kind, group, values) of what a checkpoint holds: the outer momentum, and anchors unless they are the weights."""
        for motion in self.motions:
            if motion.momentum is not None:
                yield "momentum", motion.group, motion.momentum
            if motion.anchor is not None and self.turns.streams:
                yield "anchor", motion.group, motion.anchor
