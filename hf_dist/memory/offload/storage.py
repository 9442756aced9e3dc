"""The tier of each kind of state of one model, chosen once from the config. No other module reads the offload device."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_dist.config import DistConfig, settled
from hf_dist.config.sections import AioConfig, ZeroConfig
from hf_dist.dist import collectives
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.dist.raise_on_all_ranks import agree
from hf_dist.errors import ConfigError, Problem
from hf_dist.format_bytes import size_text
from hf_dist.log import say
from hf_dist.memory.offload.host import Gradient, HostGradient, HostLink, host_zeros, step_threads
from hf_dist.memory.offload.nvme import BufferPool, DiskTensor, SwapFile, free_nbytes, no_space
from hf_dist.memory.offload.resting import Resident, Resting, Tier

_ZERO = "zero_optimization"
MASTER_NBYTES = 4
"""Bytes of an element of the fp32 master weights."""
TENSORS_PER_GROUP = 3
"""Tensors that a step brings into memory per group: masters and Adam's two states. More states take more buffers."""
_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


@dataclass
class Shelf:
    """Storage of one kind of state: `optim` (master weights, optimizer state) or `params` (shards of the weights)."""

    device: torch.device
    tier: Tier = Tier.DEVICE
    pin: bool = False
    file: SwapFile | None = None
    pool: BufferPool | None = None

    def new(self, numel: int, dtype: torch.dtype, tier: Tier | None = None) -> Resting:
        """`numel` zeros on `tier` (default: the shelf's own tier)."""
        tier = tier or self.tier
        if tier is Tier.DEVICE and self.device.type != "cpu":
            return Resident(torch.zeros(numel, dtype=dtype, device=self.device), tier)
        if tier is not Tier.DISK:
            return Resident(host_zeros(numel, dtype, pin=self.pin), tier)
        assert self.file is not None and self.pool is not None
        return DiskTensor(self.file, self.pool, numel, dtype)


class Storage:
    """Makes the tensors in which the groups of one model keep their states. Local."""

    def __init__(self, device: torch.device, zero: ZeroConfig | None = None) -> None:
        """Without offload sections in `zero`, all states are on `device`. `open_storage` opens the files."""
        zero = zero or ZeroConfig()
        optim, params = zero.offload_optimizer, zero.offload_param
        cuda = device.type == "cuda"
        self.device = device
        self.link = HostLink(device)
        self.optim = Shelf(device, _TIERS[optim.device], optim.pin_memory and cuda)
        self.params = Shelf(device, _TIERS[params.device if zero.stage == 3 else "none"], params.pin_memory and cuda)
        self.ratio = optim.ratio
        self.num_threads = step_threads(1)
        """Threads for an optimizer step on the CPU."""
        ahead = optim.pipeline_read + optim.pipeline_write
        self.optim_depth = max(1, min(optim.buffer_count, 1 + ahead))
        """With state on disk, the number of groups whose optimizer state may be in memory at once."""
        self.reads_beside, self.writes_beside = optim.pipeline_read, optim.pipeline_write
        self.ahead_numel = settled(zero.offload_param.buffer_size) * zero.offload_param.buffer_count
        """Number of weight elements that may be read ahead from disk."""
        self.ahead_count = zero.offload_param.buffer_count - 1
        """Number of groups of weights that may be read ahead; the remaining buffer is for the group written or gathered."""
        self._max_on_host = settled(zero.offload_param.max_in_cpu) if self.params.tier is Tier.DISK else 0
        self._seen = self._offloaded = self._on_host = 0

    def optim_tier(self, numel: int) -> Tier:
        """Tier of the next group's master weights and optimizer state; whole groups are offloaded up to `ratio`."""
        self._seen += numel
        if self.optim.tier is Tier.DEVICE or self._offloaded + numel > self.ratio * self._seen:
            return Tier.DEVICE
        self._offloaded += numel
        return self.optim.tier

    def params_tier(self, numel: int) -> Tier:
        """Tier of the next group's weight shard; with disk offload, the first `max_in_cpu` elements stay on the host."""
        if self._on_host + numel > self._max_on_host:
            return self.params.tier
        self._on_host += numel
        return Tier.HOST

    def gradient(self, tier: Tier, numel: int, dtype: torch.dtype) -> Gradient:
        """The reduced gradient of a group whose optimizer state rests on `tier`; it is kept where it will be stepped."""
        if tier is Tier.DEVICE:
            return Gradient(dtype)
        return HostGradient(numel, dtype, self.link, pin=self.optim.pin)

    def buffer_nbytes(self) -> dict[Tier, int]:
        """Bytes of the host buffers allocated so far for transfers to and from disk, by tier."""
        held = dict.fromkeys(Tier, 0)
        held[Tier.HOST] = sum(shelf.pool.nbytes for shelf in (self.optim, self.params) if shelf.pool is not None)
        return held

    @property
    def uses_disk(self) -> bool:
        """Whether any state can rest on disk."""
        return Tier.DISK in (self.optim.tier, self.params.tier)


def open_storage(
    config: DistConfig, mesh: ParallelMesh, *, trained_numel: int, total_numel: int, state_nbytes: int = 0
) -> Storage:
    """Make the storage that `config` asks for. Collective: every rank calls it, before anything is sharded.

    Opens the files on disk, checks that they have room for all ranks of the machine, and measures their speed.
    `trained_numel`, `total_numel`: elements of the model; `state_nbytes`: optimizer bytes per trained element, as far as known
    before the optimizer is made. Raises `ConfigError` on every rank.
    """
    zero = config.zero_optimization
    storage = Storage(mesh.device, zero)
    if storage.optim.tier is Tier.DEVICE and storage.params.tier is Tier.DEVICE:
        return storage
    problem: Problem | None = None
    needs: dict[tuple[int, str], int] = {}  # (device number, JSON path) -> bytes
    try:
        _open_files(storage, zero, config.aio, mesh.launch.rank)
        trained = int(trained_numel // mesh.shard.size * storage.ratio) * (MASTER_NBYTES + state_nbytes)
        needs = _needs(storage, config, trained, total_numel // mesh.shard.size)
    except ConfigError as error:
        problem = error.problems[0]
    agree(mesh.dp, problem, ConfigError)
    everyone = collectives.all_gather_object(mesh.dp, (socket.gethostname(), needs))
    mine = [theirs for host, theirs in everyone if host == socket.gethostname()]
    storage.num_threads = step_threads(len(mine))
    agree(mesh.dp, _shortage(storage, mine), ConfigError)
    _predict(storage, trained_numel // mesh.shard.size, len(mine))
    return storage


def _open_files(storage: Storage, zero: ZeroConfig, aio: AioConfig, rank: int) -> None:
    optim, params = zero.offload_optimizer, zero.offload_param
    for shelf, section, nvme_path, count in (
        (storage.optim, "offload_optimizer", optim.nvme_path, storage.optim_depth * TENSORS_PER_GROUP),
        (storage.params, "offload_param", params.nvme_path, params.buffer_count),
    ):
        if shelf.tier is Tier.DISK:
            assert nvme_path is not None
            shelf.pool = BufferPool(count, pin=shelf.pin)
            shelf.file = SwapFile(
                f"{_ZERO}.{section}.nvme_path",
                Path(nvme_path).expanduser(),
                block_nbytes=aio.block_size,
                num_requests=aio.intra_op_parallelism * aio.queue_depth,
                rank=rank,
            )


def _needs(storage: Storage, config: DistConfig, optim_nbytes: int, total: int) -> dict[tuple[int, str], int]:
    """Bytes of this rank's states on each disk: masters and optimizer state, and `total` weight elements."""
    element = 4 if config.dtype == "fp32" else 2
    on_host = settled(config.zero_optimization.offload_param.max_in_cpu)
    sizes = (
        (storage.optim, optim_nbytes),
        (storage.params, max(0, total - on_host) * element),
    )
    return {
        (os.stat(shelf.file.folder).st_dev, shelf.file.path): nbytes
        for shelf, nbytes in sizes
        if shelf.file is not None
    }


def _shortage(storage: Storage, machine: list[dict[tuple[int, str], int]]) -> Problem | None:
    """The problem if a disk of this rank lacks room for all ranks of the machine; else None."""
    for shelf in (storage.optim, storage.params):
        if shelf.file is None:
            continue
        device = os.stat(shelf.file.folder).st_dev
        wanted = sum(n for theirs in machine for (disk, _), n in theirs.items() if disk == device)
        if wanted > free_nbytes(shelf.file.folder):
            return no_space(shelf.file.path, shelf.file.folder, wanted)
    return None


def _predict(storage: Storage, trained: int, ranks: int) -> None:
    """Log the disk's speed and the resulting time per step. All ranks measure at the same time."""
    file = storage.optim.file or storage.params.file
    if file is None:
        return
    read, write = file.measure()
    text = f"{file.folder}: reads {size_text(read)}/s, writes {size_text(write)}/s per rank, {ranks} at a time"
    if storage.optim.file is not None:
        nbytes = trained * storage.ratio * TENSORS_PER_GROUP * MASTER_NBYTES
        seconds = nbytes / read + nbytes / write
        text += f"; about {seconds:.2g} s of every step for {size_text(nbytes)} of optimizer state (Adam)"
    say(text)
