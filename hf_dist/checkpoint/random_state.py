"""The state of all random generators of this process (torch, its device, numpy, Python) as tensors."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def raw() -> dict[str, object]:
    """The current state of the generators, in their own formats. Takes microseconds. Local."""
    state: dict[str, object] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def as_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The result of `raw` as tensors, for a checkpoint."""
    version, words, gauss = state["python"]
    _, keys, position, has_gauss, cached = state["numpy"]
    return {
        **{key: state[key] for key in ("torch", "cuda") if key in state},
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray([*keys, position, has_gauss], dtype=np.int64)),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }


def capture() -> dict[str, torch.Tensor]:
    """The current state of the generators, as tensors. Local."""
    return as_tensors(raw())


def restore(state: Mapping[str, torch.Tensor]) -> None:
    """Restore the state that `capture` returned. Local."""
    torch.set_rng_state(state["torch"])
    gauss = state["python_gauss"].tolist()
    version, *words = state["python"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.asarray(keys, dtype=np.uint32), position, has_gauss, float(state["numpy_gauss"].item()))
    )
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def put_back(state: Mapping[str, Any]) -> None:
    """Restore the state that `raw` returned, here or on another rank. Local."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def derive(seed: int, step: int, rank: int) -> None:
    """Seed all generators of a rank whose state is in no checkpoint (after a change of the number of ranks). Local."""
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    value = int.from_bytes(digest[:4], "little")
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
