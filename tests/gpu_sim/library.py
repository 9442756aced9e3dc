"""`accelerator.cpp`, compiled once for the installed torch and loaded before it. Imports no torch."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("accelerator.cpp")


@functools.cache
def why_not() -> str | None:
    """What is missing for a simulated GPU; None where it can be made."""
    if shutil.which("g++") is None:
        return "no g++: torch's CPU build runs autograd over GPU tensors only with a small library (accelerator.cpp)"
    if not (_torch() / "include" / "ATen").is_dir():
        return "torch was installed without its C++ headers"
    if list((_torch() / "lib").glob("libtorch_cuda*")):
        return "this torch knows CUDA itself: the tests of a simulated GPU are for builds without"
    return None


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def built() -> Path:
    """The library; three seconds of g++ the first time for a version of it and of torch."""
    home = _torch()
    version = (home / "version.py").read_bytes()
    name = hashlib.sha256(SOURCE.read_bytes() + version + os.fsencode(home)).hexdigest()[:16]
    library = Path(tempfile.gettempdir(), f"hf_dist_gpu_sim_{os.getuid()}", f"{name}.so")
    if library.exists():
        return library
    library.parent.mkdir(mode=0o700, exist_ok=True)
    new = library.with_suffix(f".{os.getpid()}")
    include, lib = home / "include", home / "lib"
    command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{include}", f"-I{include}/torch/csrc/api/include"]
    command += [
        f"-L{lib}",
        "-Wl,--no-as-needed",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{lib}",
        str(SOURCE),
        "-o",
        str(new),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    new.rename(library)  # another worker may have made it meanwhile
    return library


def load() -> None:
    """Before torch is imported: names are looked up in what was loaded first."""
    ctypes.CDLL(str(built()), ctypes.RTLD_GLOBAL)
