"""Who am I among the processes: the variables of torchrun, accelerate, mpirun and srun, read in one place."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass

from hf_dist.errors import TopologyError


@dataclass(frozen=True)
class Launch:
    """The place of this process in the job, as the launcher told it."""

    rank: int
    """Global rank, 0 .. world_size - 1."""
    world_size: int
    """Number of processes of the job."""
    local_rank: int
    """Rank on this machine; picks the GPU."""
    launcher: str
    """Which launcher's variables were found: torchrun, mpirun, mpich, srun or none."""


# (launcher, rank, world size, local rank). The first whose world-size variable is set wins. `accelerate launch` sets
# torchrun's. SLURM_STEP_NUM_TASKS, not SLURM_NTASKS: the latter is also set in a plain shell of an allocation, where a
# process that believed it would wait for ranks that nobody started.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def detect_launch(env: MutableMapping[str, str] | None = None) -> Launch:
    """This process's place from the launcher's variables; plain `python` is rank 0 of 1.

    Also writes torchrun's names (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) where they are missing, so that
    torch and accelerate see the same job whatever the launcher was. Raises `TopologyError` when a rank variable is
    missing, or when the rendezvous address of a job of several machines cannot be known.
    """
    env = os.environ if env is None else env
    for launcher, rank_key, size_key, local_key in _LAUNCHERS:
        # Slurm's own PMI plugin sets mpich's variables too, but only Slurm's say which machines there are.
        if size_key not in env or (launcher == "mpich" and local_key not in env and "SLURM_STEP_NUM_TASKS" in env):
            continue
        if rank_key not in env:
            raise TopologyError(
                f"{size_key}={env[size_key]} is set but {rank_key} is not: the launcher's variables are incomplete. "
                f"Start with `torchrun` or `accelerate launch`, or unset {size_key} for a single process."
            )
        rank, size = int(env[rank_key]), int(env[size_key])
        launch = Launch(rank, size, int(env.get(local_key, rank)), launcher)
        _export(launch, env)
        return launch
    return Launch(0, 1, 0, "none")


def _export(launch: Launch, env: MutableMapping[str, str]) -> None:
    env.setdefault("RANK", str(launch.rank))
    env.setdefault("WORLD_SIZE", str(launch.world_size))
    env.setdefault("LOCAL_RANK", str(launch.local_rank))
    if launch.world_size > 1 and "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = _master_address(launch, env)
    job = re.sub(r"\D", "", env.get("SLURM_JOB_ID", "") or env.get("PMIX_NAMESPACE", "")) or "0"
    env.setdefault("MASTER_PORT", str(29500 + int(job) % 1000))


def _master_address(launch: Launch, env: MutableMapping[str, str]) -> str:
    if launch.launcher == "srun":
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "")
        found = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
        if found:
            return found[1] + (found[2] or "")
    local_size = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") or env.get("MPI_LOCALNRANKS")
    if local_size is not None and int(local_size) == launch.world_size:
        return "127.0.0.1"
    raise TopologyError(
        f"{launch.launcher} started {launch.world_size} processes but MASTER_ADDR is not set and cannot be derived. "
        "Export MASTER_ADDR=<host of rank 0> (and MASTER_PORT) for all processes."
    )
