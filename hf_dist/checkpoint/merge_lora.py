"""Adds a LoRA adapter to its base model while the tensors stream through: W + scaling * B A, a few rows at a time.

PEFT's `merge_and_unload` needs the whole model in memory. This module merges plain LoRA on linear layers, including
`modules_to_save`, rank and alpha patterns, rsLoRA and `fan_in_fan_out`. Everything else is refused by name.
Source of the arithmetic: peft `tuners/lora/layer.py` (`Linear.get_delta_weight`, `LoraLayer.update_layer`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from hf_dist.checkpoint.safetensors_source import FileTensor, SafetensorsFile
from hf_dist.errors import CheckpointError

__all__ = ["MergedTensor", "base_folder", "merge"]

_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_REMEDY = (
    "Merge it with PEFT, in memory for the whole model: PeftModel.from_pretrained(base, adapter).merge_and_unload()."
)
# Settings that change the arithmetic, with the values that do not. PiSSA, OLoRA and similar also change the base weights.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True)
class MergedTensor:
    """A base weight with its LoRA update, read like a `FileTensor`."""

    base: FileTensor | MergedTensor
    a: torch.Tensor  # [rank, in], fp32
    b: torch.Tensor  # [out, rank], fp32
    scaling: float
    transposed: bool
    """Whether the base stores [in, out], as GPT-2's Conv1D does."""

    @property
    def name(self) -> str:
        """Name on disk."""
        return self.base.name

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the base; the sum is rounded to it, as in PEFT."""
        return self.base.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.base.shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.base.numel

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill `out` (1-D, the base's dtype) with elements [start, stop)."""
        self.base.read(start, stop, out)
        columns = self.shape[1]
        first, last = start // columns, -(-stop // columns)
        rows = self.a[:, first:last].T @ self.b.T if self.transposed else self.b[first:last] @ self.a
        delta = rows.mul_(self.scaling).reshape(-1)[start - first * columns : stop - first * columns]
        out.copy_(out.float() + delta)


def base_folder(adapter: Path, given: str | None = None) -> Path:
    """The local folder of an adapter's base model: `given`, a folder or an ID, or what the adapter names.

    Raises `CheckpointError`.
    """
    named = _config(adapter).get("base_model_name_or_path")
    name = given or named
    if not name:
        raise CheckpointError(
            f"{adapter / 'adapter_config.json'} names no base model (base_model_name_or_path is {named!r}). "
            "Name its folder, or its ID on the hub: --base FOLDER."
        )
    if Path(name).is_dir():
        return Path(name)
    where = "--base" if given else f"{adapter / 'adapter_config.json'}: base_model_name_or_path"
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError) as error:
        raise CheckpointError(
            f"{where} is {name!r}, which is neither a folder nor a model in the hub cache of this machine. "
            "Download it, or name its folder: --base FOLDER."
        ) from error


def merge(
    adapter: Path, base: Mapping[str, Mapping[str, FileTensor | MergedTensor]]
) -> dict[str, dict[str, FileTensor | MergedTensor]]:
    """`base` (file -> name -> tensor) with the adapter in the folder `adapter` added.

    Raises `CheckpointError` for adapters that it cannot merge.
    """
    config = _config(adapter)
    for key, plain in _PLAIN.items():
        if config.get(key, plain[0]) not in plain:
            raise CheckpointError(f"--merge-lora cannot merge this adapter: {key} is {config[key]!r}. {_REMEDY}")
    found: dict[str, dict[str, FileTensor | MergedTensor]] = {file: dict(tensors) for file, tensors in base.items()}
    places = {name: file for file, tensors in base.items() for name in tensors}
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in SafetensorsFile(adapter / "adapter_model.safetensors").tensors().items():
        name = key.removeprefix(_PREFIX)
        match = _FACTOR.fullmatch(name)
        target = f"{match['module']}.weight" if match else name
        fits = target in places and (len(tensor.shape) == 2 or match is None)
        if not fits or (match is None and base[places[target]][target].shape != tensor.shape):
            raise CheckpointError(
                f"--merge-lora cannot merge {key}: the base model has no weight on disk that it is added to. {_REMEDY}"
            )
        if match is None:  # modules_to_save, trained biases
            renamed = copy(tensor)
            renamed.name = target
            found[places[target]][target] = renamed
        else:
            factors.setdefault(match["module"], {})[match["side"]] = _values(tensor)
    for module, sides in factors.items():
        name = f"{module}.weight"
        file = places[name]
        found[file][name] = _merged(base[file][name], module, sides, config)
    return found


def _config(adapter: Path) -> dict[str, Any]:
    path = adapter / "adapter_config.json"
    if not path.is_file():
        raise CheckpointError(f"--merge-lora: {adapter} holds no adapter (no adapter_config.json)")
    config: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return config


def _values(tensor: FileTensor) -> torch.Tensor:
    values = torch.empty(tensor.numel, dtype=tensor.dtype)
    tensor.read(0, tensor.numel, values)
    return values.view(tensor.shape).float()


def _merged(
    base: FileTensor | MergedTensor, module: str, sides: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> MergedTensor:
    if sides.keys() != {"A", "B"}:
        raise CheckpointError(f"the adapter holds only lora_{min(sides)} of {module}; its file is damaged")
    a, b = sides["A"], sides["B"]
    patterns = config.get("alpha_pattern") or {}
    alpha = next((v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", module)), config["lora_alpha"])
    scaling = alpha / (a.shape[0] ** 0.5 if config.get("use_rslora") else a.shape[0])
    transposed = bool(config.get("fan_in_fan_out"))
    shape = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
    if base.shape != shape:
        raise CheckpointError(
            f"{module}: the adapter was trained on a weight of {shape}, the base model has {base.shape}"
        )
    return MergedTensor(base, a, b, scaling, transposed)
