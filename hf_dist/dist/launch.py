"""This process's place in the job, read from the variables of torchrun, accelerate, mpirun and srun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from hf_dist.errors import TopologyError


@dataclass(frozen=True)
class Launch:
    """This process's place in the job, according to the launcher."""

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
# process would wait for ranks that were never started.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


_LOCAL_SIZES = {
    "torchrun": "LOCAL_WORLD_SIZE",
    "mpirun": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpich": "MPI_LOCALNRANKS",
}
"""Launcher -> its variable for the number of processes on this machine; srun has a list for all machines."""
_MOST = 10**9
"""Above every number that a launcher sets."""


def detect_launch(env: MutableMapping[str, str] | None = None) -> Launch:
    """Read this process's place from the launcher's variables; plain `python` is rank 0 of 1.

    Also sets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) if missing and
    known, so that torch and accelerate see the same job under any launcher. Raises `TopologyError` if a rank variable is
    missing or no number of this job, if MASTER_PORT is 0, or if the address of rank 0 on another machine cannot be derived.
    """
    env = os.environ if env is None else env
    for launcher, rank_key, size_key, local_key in _LAUNCHERS:
        # Slurm's own PMI plugin sets mpich's variables too, but only Slurm's variables list the machines.
        if size_key not in env or (launcher == "mpich" and local_key not in env and "SLURM_STEP_NUM_TASKS" in env):
            continue
        if rank_key not in env:
            raise TopologyError(
                f"{size_key}={env[size_key]} is set but {rank_key} is not: the launcher's variables are incomplete. "
                f"Start with `torchrun` or `accelerate launch`, or unset {size_key} for a single process."
            )
        size = _number(env, size_key, launcher, 1)
        rank = _number(env, rank_key, launcher, 0, below=size, of=size_key)
        local = _number(env, local_key, launcher, 0) if local_key in env else rank
        launch = Launch(rank, size, local, launcher)
        _export(launch, env)
        return launch
    return Launch(0, 1, 0, "none")


def _number(
    env: Mapping[str, str], key: str, launcher: str, least: int, *, below: int = _MOST, of: str | None = None
) -> int:
    """The value of a launcher's variable. `of`: the variable with the number of processes, where it must be below that."""
    text = env[key].strip()
    if text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) < below:
        return int(text)
    wanted = f"a whole number from {least}"
    if below < _MOST:
        wanted += f" to {below - 1}" + (f" ({of}={below})" if of else "")
    raise TopologyError(
        f"{key}={env[key]!r} is not {wanted}. {launcher} sets this variable for each process; if you exported it yourself, "
        "unset it and let the launcher do so."
    )


def _export(launch: Launch, env: MutableMapping[str, str]) -> None:
    env.setdefault("RANK", str(launch.rank))
    env.setdefault("WORLD_SIZE", str(launch.world_size))
    env.setdefault("LOCAL_RANK", str(launch.local_rank))
    local_size = _local_size(launch, env)
    if local_size is not None:
        env.setdefault("LOCAL_WORLD_SIZE", str(local_size))
    if launch.world_size > 1 and "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = _master_address(launch, env)
    job = re.sub(r"\D", "", env.get("SLURM_JOB_ID", "") or env.get("PMIX_NAMESPACE", "")) or "0"
    env.setdefault("MASTER_PORT", str(29500 + int(job[-9:]) % 1000))
    port = _number(env, "MASTER_PORT", launch.launcher, 0, below=65536)
    if port == 0 and launch.world_size > 1:  # rank 0 would listen at a port that no other rank learns of
        raise TopologyError(
            f"MASTER_PORT=0: the {launch.world_size} ranks cannot meet at port 0. Set one free port from 1 to 65535 on every "
            "rank (--master_port, --main_process_port or the variable); on one machine `torchrun --standalone` finds one."
        )


def _master_address(launch: Launch, env: MutableMapping[str, str]) -> str:
    if launch.launcher == "srun":
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "")
        # "rack[1-2]node[01,03],other": a comma in brackets ends no name.
        first = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodes)
        if first:
            return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])
    if _local_size(launch, env) == launch.world_size:
        return "127.0.0.1"
    raise TopologyError(
        f"{launch.launcher} started {launch.world_size} processes but MASTER_ADDR is not set and cannot be derived. "
        "Export MASTER_ADDR=<host of rank 0> (and MASTER_PORT) for all processes."
    )


def _local_size(launch: Launch, env: Mapping[str, str]) -> int | None:
    """Number of processes of this job on this machine; None if the launcher does not say."""
    if launch.launcher in _LOCAL_SIZES:
        key = _LOCAL_SIZES[launch.launcher]
        return _number(env, key, launch.launcher, 1) if key in env else None
    # Counts per machine of the step: "2(x3),1" means 2, 2, 2, 1. The last variable holds one number for all machines, if given.
    for key in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        counts = [
            int(found[1])
            for part in env.get(key, "").split(",")
            if (found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()))
            for _ in range(int(found[2] or 1))
        ]
        machine = _number(env, "SLURM_NODEID", launch.launcher, 0) if "SLURM_NODEID" in env else 0
        # Counts may describe the whole allocation instead of this step: use them only if they add up.
        if key == "SLURM_NTASKS_PER_NODE" and counts:
            return min(counts[0], launch.world_size)
        if machine < len(counts) and sum(counts) == launch.world_size:
            return counts[machine]
    return None
