"""The outer step: averages the movement of a sharded model's replicas since their last meeting, and applies it by an own SGD.

    pseudo-gradient = anchor - weights              of this replica, in fp32; the anchor: weights after the last meeting
    anchor         -= outer_lr * SGD(mean over the replicas)
    weights         = anchor

A rate of 1 without momentum gives the mean of the weights. Then there is neither anchor nor state, and the weights
themselves are sent; in a wire codec movements are, because masters are not rounded. Fragments may take turns and overlap
training (`turns.py`):

    weights         = mix * weights + (1 - mix) * anchor        some steps after the pseudo-gradient was taken

Sources: local SGD, Stich 2018 (arXiv 1805.09767); DiLoCo, Douillard et al. 2023 (arXiv 2311.08105); fragments, 2501.18512.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

from hf_dist.config import DistConfig
from hf_dist.config.training_sections import LocalSgdConfig
from hf_dist.dist import collectives
from hf_dist.dist.coded import Wire
from hf_dist.dist.collectives import Handle
from hf_dist.dist.mesh import MeshAxis
from hf_dist.errors import ModelError
from hf_dist.memory.offload.host import sent
from hf_dist.memory.offload.resting import Resting, Tier, opened
from hf_dist.optim.loss_scale import DynamicLossScaler
from hf_dist.parallel.local_sgd.turns import Turns
from hf_dist.sharding import messages
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.precision import MASTER_DTYPE
from hf_dist.sharding.runtime import ShardedModel

__all__ = ["GroupMotion", "OuterOptimizer", "num_outer_states", "refuse_other_weights"]

MAX_IN_FLIGHT = 2
"""Groups whose pseudo-gradients are in flight at the same time, as with gradients."""


class GroupMotion:
    """One group's local state besides its weights: the anchor common to all replicas, and the outer momentum."""

    def __init__(self, group: FlatGroup, config: LocalSgdConfig, wire: Wire | None = None) -> None:
        """`wire`: how movements travel; None: as they are."""
        self.group, self.wire = group, wire
        self._rate, self._factor, self._nesterov = config.outer_lr, config.outer_momentum, config.nesterov
        numel, tier = group.resting[1] - group.resting[0], group.master.tier
        shelf = group.rest.storage.optim
        anchored = has_anchor(config, encoded=wire is not None)
        self.anchor: Resting | None = shelf.new(numel, MASTER_DTYPE, tier) if anchored else None
        has_momentum = config.outer_momentum > 0 and not config.is_served  # a server keeps that of its replicas
        self.momentum: Resting | None = shelf.new(numel, MASTER_DTYPE, tier) if has_momentum else None

    @torch.no_grad()
    def begin(self) -> None:
        """Set the anchor to the current weights. Local."""
        if self.anchor is not None:
            with opened(self.group.master) as masters, opened(self.anchor, changed=True) as anchor:
                anchor.copy_(masters)

    @torch.no_grad()
    def outgoing(self) -> torch.Tensor:
        """The values to average, 1-D, a copy on the device. Local."""
        if self.anchor is None:
            return self.weights()
        self.group.master.wait()  # a step may still be writing it
        with opened(self.group.master) as masters, opened(self.anchor) as anchor:
            return sent(anchor - masters, self.group.mesh.device)

    @torch.no_grad()
    def incoming(self, mean: torch.Tensor, mix: float = 0.0) -> None:
        """Step the anchor by the mean of `outgoing` over the replicas, and set the weights from it. Local.

        `mix`: the share of this replica's own weights that is kept.
        """
        self.group.master.wait()  # steps may have run since it was sent
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
        self.group.master.wait()
        with opened(self.group.master) as masters:
            return sent(masters.clone(), self.group.mesh.device)

    @torch.no_grad()
    def become(self, weights: torch.Tensor) -> None:
        """Set the master weights; anchor and momentum stay. Local."""
        with opened(self.group.master, changed=True) as masters:
            masters.copy_(weights)
        self.group.masters_changed()

    @torch.no_grad()
    def settle(self, weights: torch.Tensor) -> None:
        """Set the master weights and the anchor. Local."""
        assert self.anchor is not None
        with opened(self.anchor, changed=True) as anchor:
            anchor.copy_(weights)
        self.become(weights)

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


def num_outer_states(config: DistConfig, replicas: int) -> int:
    """Number of fp32 tensors that a rank keeps besides its master weights, with `replicas` in its job or a server of them."""
    section = config.local_sgd
    if section.is_served:
        return 1
    anchored = has_anchor(section, encoded=config.hf_dist.wires.meetings is not None)
    return anchored + (section.outer_momentum > 0) if section.enabled and replicas > 1 else 0


def has_anchor(config: LocalSgdConfig, *, encoded: bool) -> bool:
    """Whether replicas keep the weights of their last meeting; the plain mean of the weights needs none, unless movements
    are encoded."""
    return config.is_served or encoded or config.outer_lr != 1 or config.outer_momentum > 0


def refuse_other_weights(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ModelError` for an optimizer that evaluates with other weights: replicas average only the trained ones."""
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ModelError(
            f"{type(optimizer).__name__} keeps other weights for evaluation than for training (`eval()`, `train()`), and "
            'replicas that train alone ("local_sgd") would agree on the latter only. Use an optimizer without them, such as '
            '"AdamW", or remove "local_sgd"'
        )


def resident_nbytes(motions: Iterable[GroupMotion]) -> dict[Tier, int]:
    """Bytes of anchors and momenta at rest, by kind of memory."""
    held = dict.fromkeys(Tier, 0)
    for motion in motions:
        for tier, nbytes in motion.resident_nbytes().items():
            held[tier] += nbytes
    return held


def let_masters_rest(sharded: ShardedModel) -> None:
    """Wait for masters on the host, which may still be in transfer. Local."""
    if sharded.mesh.device.type == "cuda":
        torch.cuda.synchronize(sharded.mesh.device)


class OuterOptimizer:
    """Lets the replicas of one model meet at intervals. Every rank has one and makes the same calls."""

    def __init__(self, sharded: ShardedModel, config: LocalSgdConfig) -> None:
        """Local. The replicas must be equal when it is created and whenever weights are loaded."""
        assert sharded.mesh.replicas is not None
        self.axis: MeshAxis = sharded.mesh.replicas
        self.every = config.every
        """Optimizer steps between two meetings; 0: the caller of `synchronize` counts."""
        self.met = True
        """Whether no step ran since the last meeting. Then a save or an evaluation covers all replicas."""
        self.interval_ended = True
        """Whether the last step ended an interval of `every` steps, when the job may contact all replicas."""
        self._anchored = False
        self.sharded = sharded
        self.copies = self.axis.size
        """Replicas whose optimizer states are in a checkpoint."""
        self.kinds = [
            name for name, is_kept in (("momentum", config.outer_momentum > 0), ("anchor", config.streams)) if is_kept
        ]
        """Of `states`."""
        self.motions = [GroupMotion(group, config, self._wire(group)) for group in sharded.trainable_groups]
        self.turns = Turns(config, len(sharded.units))
        self._mix = config.mix
        of_group = {id(motion.group): motion for motion in self.motions}
        self._fragments = [
            [of_group[id(group)] for unit in units for group in sharded.units[unit].groups if id(group) in of_group]
            for units in self.turns.units
        ]

    def _wire(self, group: FlatGroup) -> Wire | None:
        """How a group's movements travel, kept with its other messages, as what they leave out is saved with theirs."""
        wires = self.sharded.placements.wires
        if wires.meetings is None:
            return None
        group.messages["meetings"] = wire = Wire(wires.meetings, wires.feedback, of_gradients=False)
        return wire

    def before_training(self) -> bool:
        """Before a training forward. Whether weights changed: no."""
        return False

    def before_backward(self) -> None:
        """At the start of backward: the first one after a meeting stores the common weights, with user writes. Local."""
        if self.met and not self._anchored:
            self._anchored = True
            self.sharded.take_writes()
            for motion in self.motions:
                motion.begin()

    def after_step(self, number: int, scaler: DynamicLossScaler | None) -> bool:
        """After step `number` ran or was skipped (skipped steps count, so all replicas meet together). Whether weights changed.

        Collective over the replicas at every `every`-th step and where a fragment has its turn, otherwise local.
        """
        self.met = False
        self.interval_ended = bool(self.every) and number % self.every == 0
        if self.every and self.turns.streams:
            return self._take_turns(number)
        if self.interval_ended:
            self.synchronize(scaler)
        return self.interval_ended

    def _take_turns(self, number: int) -> bool:
        starting = list(self.turns.starting(number))
        if starting or self.turns.is_due(number):
            let_masters_rest(self.sharded)
        for fragment in starting:
            for motion in self._fragments[fragment]:
                if motion.group.layout.numel:
                    self.turns.add(number, self._start(motion, motion.outgoing, self._mixed(motion), motion.wire))
        return self.turns.take_up(number)

    def _mixed(self, motion: GroupMotion) -> Callable[[torch.Tensor], None]:
        return lambda mean: motion.incoming(mean, self._mix)

    def synchronize(self, scaler: DynamicLossScaler | None) -> None:
        """Give all replicas the same weights; call `weights_changed()` afterwards. Collective over the replicas.

        Runs the outer step. If fragments take turns, averages the weights instead, which does not change the replicas' mean
        movement: anchors stay, and the next outer steps are the same as without this meeting. So these are not encoded.
        """
        let_masters_rest(self.sharded)
        self.turns.take_up()
        in_turn = bool(self.every) and self.turns.streams
        in_flight: deque[Callable[[], None]] = deque()
        for motion in self.motions:
            if not motion.group.layout.numel:
                continue
            if len(in_flight) >= MAX_IN_FLIGHT:
                in_flight.popleft()()
            if in_turn:
                in_flight.append(self._start(motion, motion.weights, motion.become, None))
            else:
                in_flight.append(self._start(motion, motion.outgoing, motion.incoming, motion.wire))
        while in_flight:
            in_flight.popleft()()
        self.sharded.passes.buffers.share(self.axis)
        if scaler is not None and scaler.dynamic:
            self._agree_on_scale(scaler)
        self.met, self.interval_ended, self._anchored = True, True, in_turn

    def _start(
        self,
        motion: GroupMotion,
        outgoing: Callable[[], torch.Tensor],
        incoming: Callable[[torch.Tensor], None],
        wire: Wire | None,
    ) -> Callable[[], None]:
        values = outgoing()
        handle: Handle = messages.mean(self.axis, values, wire, motion.group.rest.storage.link)

        def take_up() -> None:
            handle.wait()
            incoming(values)

        return take_up

    def _agree_on_scale(self, scaler: DynamicLossScaler) -> None:
        """Set all replicas to the smallest loss scale among them, because each has changed its own since the last meeting."""
        state = scaler.state_dict()
        rows = torch.zeros(self.axis.size, len(state), dtype=torch.float64)
        rows[self.axis.rank] = torch.tensor([float(value) for value in state.values()])
        flat = sent(rows.view(-1), self.sharded.mesh.device)
        collectives.all_gather(self.axis, flat).wait()
        everyone = flat.view(rows.shape).tolist()
        smallest = min(everyone, key=lambda row: row[0])
        scaler.load_state_dict(dict(zip(state, smallest, strict=True)))

    def before_load(self) -> None:
        """Before weights are loaded, discard what is in flight. Collective over the replicas."""
        self.turns.take_up()
        self._anchored = False

    def restart(self) -> None:
        """Start again from equal weights, after all replicas loaded them. Local."""
        self.met = self.interval_ended = True

    def anchors_loaded(self) -> None:
        """Keep the anchors loaded from a checkpoint instead of the weights. Local."""
        self._anchored = True

    def loading_states(self) -> Iterator[tuple[str, FlatGroup, Resting]]:
        """What a checkpoint is read into."""
        return self.states()

    def plain_state(self) -> dict[str, int]:
        """Numbers for a checkpoint: none."""
        return {}

    def load_plain_state(self, state: dict[str, int]) -> None:
        """Nothing."""

    def resident_nbytes(self) -> dict[Tier, int]:
        """Bytes of anchors and momenta at rest, by kind of memory."""
        return resident_nbytes(self.motions)

    def states(self) -> Iterator[tuple[str, FlatGroup, Resting]]:
        """(kind, group, values) for a checkpoint: the outer momentum, and anchors unless they equal the weights."""
        for motion in self.motions:
            if motion.momentum is not None:
                yield "momentum", motion.group, motion.momentum
            if motion.anchor is not None and self.turns.streams:
                yield "anchor", motion.group, motion.anchor
