"""`hf-dist env`: the installed versions, as a bug report needs them."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table

from hf_dist.dist.launch import detect_launch
from hf_dist.errors import HfDistError
from hf_dist.format_bytes import size_text
from hf_dist.version import untested

__all__ = ["PACKAGES", "devices", "env", "launch_variables", "table", "versions"]

PACKAGES = ("hf-dist", "torch", "transformers", "accelerate", "datasets", "safetensors", "peft", "trl")
_ABSENT = "not installed"
_LAUNCH_VARIABLES = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_(ADDR|PORT)|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS"
    r"|HF_DIST_\w+|HF_HUB_OFFLINE|ACCELERATE_\w+|NCCL_\w+|GLOO_\w+|SLURM_(PROCID|LOCALID|STEP_\w+)|OMPI_COMM_WORLD_\w+"
)


def env() -> None:
    """Print versions, devices, communication backends and the launcher's variables: what a bug report needs."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(table("versions", versions()))
    console.print(table("devices", devices()))
    console.print(table("launch", launch_variables()))
    for note in untested({name: found for name, found in versions() if found != _ABSENT}):
        print(f"note: {note}")


def table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of two columns without lines."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def versions() -> Iterable[tuple[str, str]]:
    """Versions of Python and the relevant packages."""
    yield "python", f"{platform.python_version()} ({platform.platform()})"
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, _ABSENT


def devices() -> Iterable[tuple[str, str]]:
    """Devices of this machine, and the backends in this build of torch."""
    import torch

    from hf_dist.sharding.precision import is_emulated

    slow = is_emulated(torch.bfloat16, torch.device("cpu"))
    capability = f"{torch.backends.cpu.get_cpu_capability()}, {'no bf16 (slow)' if slow else 'bf16'}"
    yield "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads, {capability}"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        bf16 = "bf16" if device.major >= 8 else "no bf16"
        yield f"cuda:{index}", f"{device.name}, {size_text(device.total_memory)}, {bf16}"
    if not torch.cuda.is_available():
        yield "cuda", "not available" if torch.version.cuda else "not in this build of torch"
    # torch's build report names the compiled backends; asking torch.distributed would import it.
    built = dict(re.findall(r"USE_(GLOO|NCCL|MPI|XCCL)=(\w+)", torch.__config__.show()))
    yield "backends", ", ".join(name.lower() for name, on in built.items() if on not in {"0", "OFF"}) or "none"


def launch_variables() -> Iterable[tuple[str, str]]:
    """The launcher's variables."""
    try:
        launch = detect_launch(dict(os.environ))
        yield "process", f"rank {launch.rank} of {launch.world_size}, launcher: {launch.launcher}"
    except HfDistError as error:
        yield "process", str(error)
    for name in sorted(filter(_LAUNCH_VARIABLES.fullmatch, os.environ)):
        yield name, os.environ[name]
