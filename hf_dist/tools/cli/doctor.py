"""`hf-dist doctor`: is this machine ready for a job? Checks matching versions, devices, network, and a process group."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_dist.dist.launch import detect_launch
from hf_dist.format_bytes import size_text
from hf_dist.tools.cli.env import PACKAGES, devices, launch_variables, table, versions
from hf_dist.tools.cli.launch import distributed_type
from hf_dist.version import untested

__all__ = ["KNOWN_BAD", "doctor", "launcher_notes", "version_problems"]

KNOWN_BAD = (
    ("transformers", ">=5", "peft", "<0.18", "peft imports names that transformers 5 no longer has"),
    ("transformers", ">=5", "accelerate", "<1.1", "the Trainer passes arguments unknown to accelerate"),
)
"""Pairs of versions that do not work together although their own requirements allow it."""
_GROUP_SECONDS = 10.0
_RENDEZVOUS_SECONDS = 60
_MIB = 1 << 20

Ranks = Annotated[
    int,
    typer.Option(
        help="Processes of the group test on this machine, over gloo; under a launcher: those of the job.", min=1
    ),
]


def doctor(ranks: Ranks = 2) -> None:
    """Check versions, devices and network, and try a process group. Exit code 1 if something is wrong.

    Started by torchrun or another launcher on every node, it tests the process group that a job there would use.
    """
    launch = detect_launch()
    problems = []
    console = Console(soft_wrap=True, highlight=False)
    if launch.rank == 0:
        problems = version_problems(_installed())
        console.print(table("versions", versions()))
        console.print(table("devices", devices()))
        console.print(table("network", _network()))
        console.print(table("launch", launch_variables()))
    if launch.world_size > 1:
        found, wrong = _test_group(launch.rank, launch.world_size)
    else:
        found, wrong = _test_locally(ranks)
    if launch.rank == 0:
        console.print(table("group test", found))
        problems += wrong
        if not shutil.which("c++") and not shutil.which("g++") and not shutil.which("clang++"):
            print("note: no C++ compiler: torch.compile needs one on the CPU; nothing else here does")
        for note in [*untested(_installed()), *launcher_notes()]:
            print(f"note: {note}")
        for problem in problems:
            print(f"problem: {problem}")
        print("nothing is wrong" if not problems else f"{len(problems)} found")
    if problems or wrong:
        sys.exit(1)


def launcher_notes() -> list[str]:
    """What starts a job whose YAML, accelerate's default one, asks for a package that is not here."""
    from accelerate.commands.config import config_args
    from accelerate.utils import is_deepspeed_available

    path = Path(config_args.default_config_file)
    asked = distributed_type(path)
    if asked == "DEEPSPEED" and not is_deepspeed_available():
        return [
            f"{path} says DEEPSPEED: `accelerate launch` ends with 'DeepSpeed is not installed' before a script starts. "
            "No need for that package: `hf-dist launch` takes the same arguments"
        ]
    if asked == "FSDP":
        return [
            f"{path} says FSDP: `accelerate launch` starts accelerate's own FSDP, which is refused beside a dist_config. "
            f"`hf-dist config convert {path} --output zero3.json` takes its settings over; write "
            "distributed_type: MULTI_GPU into it"
        ]
    return []


def version_problems(installed: dict[str, str]) -> list[str]:
    """Requirements of these versions that are not met. `installed`: package -> version."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    problems = []
    for package in installed:
        for text in requires(package) or ():
            need = Requirement(text)
            have = installed.get(need.name)
            applies = need.marker is None or need.marker.evaluate({"extra": ""})
            if have is not None and applies and not need.specifier.contains(have, prereleases=True):
                problems.append(
                    f"{package} {installed[package]} needs {need.name}{need.specifier}, and {have} is installed"
                )
    for first, its, second, theirs, why in KNOWN_BAD:
        if first in installed and second in installed:
            bad = SpecifierSet(its).contains(installed[first]) and SpecifierSet(theirs).contains(installed[second])
            if bad:
                problems.append(
                    f"{first} {installed[first]} with {second} {installed[second]}: {why}. Upgrade {second}."
                )
    return problems


def _installed() -> dict[str, str]:
    found = {}
    for package in (*PACKAGES, "torchvision", "torchaudio", "tokenizers", "huggingface-hub", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _network() -> Iterable[tuple[str, str]]:
    import torch

    from hf_dist.dist import network

    yield (
        "interfaces",
        ", ".join(name for _, name in socket.if_nameindex()) if hasattr(socket, "if_nameindex") else "unknown",
    )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if variable in os.environ:
            yield variable, os.environ[variable]
    adapters = Path("/sys/class/infiniband")
    yield "infiniband", ", ".join(sorted(p.name for p in adapters.iterdir())) if adapters.is_dir() else "none"
    count = torch.cuda.device_count()
    if count:
        yield "nccl", network.nccl_version()
        yield "memory", network.allocator()
        yield "queues", network.connections()
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        yield "GPU to GPU", f"{direct} of {len(pairs)} pairs reach each other's memory" if pairs else "one GPU"
    if Path("/dev/shm").is_dir():
        yield (
            "shared memory",
            f"{size_text(shutil.disk_usage('/dev/shm').free)} free (NCCL and data loader workers use it)",
        )


def _test_locally(ranks: int) -> tuple[list[tuple[str, str]], list[str]]:
    from hf_dist.dist.spawn import run_ranks

    try:
        results = run_ranks(_test_group, ranks, timeout=60 + 5 * ranks, preload=("torch", "torch.distributed"))
    except RuntimeError as error:
        return [("ranks", str(ranks))], [f"the group test failed: {error}"]
    return results[0][0], list(dict.fromkeys(problem for _, wrong in results for problem in wrong))


def _test_group(rank: int, world: int) -> tuple[list[tuple[str, str]], list[str]]:
    """Table rows and problems of one rank. Collective; takes at most ten seconds once all ranks have joined."""
    import torch

    from hf_dist.dist import collectives, network
    from hf_dist.dist.mesh import build_mesh

    start = time.perf_counter()
    try:
        mesh = build_mesh(timeout=timedelta(seconds=_RENDEZVOUS_SECONDS))
    except RuntimeError as error:
        reason = (str(error).splitlines() or ["?"])[0]
        return [], [f"rank {rank}: the {world} ranks did not find each other in {_RENDEZVOUS_SECONDS} s: {reason}"]
    rows = [("ranks", mesh.describe()), ("together after", f"{time.perf_counter() - start:.1f} s")]
    rows += [("network" if number == 0 else "", line) for number, line in enumerate(network.describe(mesh))]
    if mesh.dp.size != world:
        return rows, [f"{mesh.dp.size} ranks found each other, {world} were started"]
    wrong: list[str] = []
    small = torch.full((1,), float(rank), device=mesh.device)
    collectives.all_reduce(mesh.dp, small, op="sum").wait()
    if small.item() != world * (world - 1) / 2:
        wrong.append(f"rank {rank}: a sum over {world} ranks gave {small.item()}")
    rows.append(
        ("latency", f"{1e6 * _seconds(mesh, torch.zeros(1, device=mesh.device)):.0f} us per all-reduce of one number")
    )
    for mib in (1, 64):
        full = torch.zeros(mib * _MIB // 4, device=mesh.device)
        seconds = _seconds(mesh, full)
        rate = 2 * (world - 1) / world * full.nbytes / seconds
        rows.append((f"{mib} MiB", f"{seconds * 1e3:.1f} ms per all-reduce, {rate / 1e9:.2f} GB/s sent per rank"))
    return rows, wrong


def _seconds(mesh: Any, tensor: Any) -> float:
    """Seconds of one all-reduce. Ranks stop together, because they decide by a common clock."""
    import torch

    from hf_dist.dist import collectives

    def once() -> None:
        collectives.all_reduce(mesh.dp, tensor).wait()
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()

    once()
    start = time.perf_counter()
    once()
    spent = torch.tensor([time.perf_counter() - start], device=mesh.device)
    collectives.all_reduce(mesh.dp, spent, op="max").wait()
    count = max(1, min(20, int(_GROUP_SECONDS / 6 / max(spent.item(), 1e-6))))
    start = time.perf_counter()
    for _ in range(count):
        once()
    return (time.perf_counter() - start) / count
