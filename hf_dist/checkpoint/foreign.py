"""Checkpoints of other programs: recognised by their files, imported as far as possible, or refused with advice.

    the stock Trainer       model*.safetensors, pytorch_model*.bin     weights (HF's loader), optimizer by position
                            + optimizer.pt
    FSDP, sharded           pytorch_model_fsdp_0/ + optimizer_0/       everything by name; each rank reads its part
    FSDP, full              pytorch_model_fsdp.bin + optimizer.bin     everything by name, memory-mapped
    DeepSpeed universal     [*_universal/]zero/<parameter>/fp32.pt     everything by name, memory-mapped
    DeepSpeed ZeRO          global_step*/*_model_states.pt             weights, if the folder has them as HF files

Only tensors, numbers and strings are unpickled. Sources: transformers/trainer.py, accelerate/utils/fsdp_utils.py,
deepspeed/checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hf_dist.checkpoint.check_names import refuse_unknown
from hf_dist.checkpoint.flat_slice import FlatSlice
from hf_dist.checkpoint.foreign_sources import DcpSource, MappedSource, Source, load_file, optimizer_name, plain
from hf_dist.checkpoint.training_state import Stateful, Stored, fill_optimizer, fill_weights, missing_weights
from hf_dist.dist.raise_on_all_ranks import agree
from hf_dist.errors import CheckpointError, first_of
from hf_dist.optim.optimizers import Optimizers
from hf_dist.optim.resume_hyperparams import kind_of
from hf_dist.optim.stepping import state_names

__all__ = ["Imported", "load_foreign", "program_of"]

TRAINER, FSDP_SHARDED, FSDP_FULL = "the stock Trainer", "FSDP (sharded state)", "FSDP (full state)"
UNIVERSAL, DEEPSPEED = "DeepSpeed (universal)", "DeepSpeed"

_KERNEL_CHOICES = {"params", "foreach", "fused", "capturable", "differentiable", "maximize", "param_names"}
_HF_WEIGHTS = ("model*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin", "adapter_model.*")


@dataclass
class Imported:
    """The result of `load_foreign`."""

    program: str
    weights: bool
    """False if the weights are HF files in the folder, for HF's loader to read."""
    optimizer: bool = False
    states: str = ""
    """How many parameters have one, if not all that are trained."""
    notes: list[str] = field(default_factory=list)
    """What was not imported, and why."""


def program_of(directory: Path) -> str | None:
    """The program that wrote `directory`; None for a plain model folder or hf_dist's own. Local; checks names only."""
    if _universal_folder(directory) is not None:
        return UNIVERSAL
    if any(_matches(directory, "*_model_states.pt", "*_optim_states.pt", "global_step*/*_states.pt")):
        return DEEPSPEED
    if (directory / "pytorch_model_fsdp_0").is_dir():
        return FSDP_SHARDED
    if any(_matches(directory, "pytorch_model_fsdp*.bin")):
        return FSDP_FULL
    return TRAINER if (directory / "optimizer.pt").is_file() else None


def load_foreign(engine: Stateful, directory: Path, program: str) -> Imported:
    """Import as much as possible from a checkpoint of `program`. Collective: every rank.

    Raises `CheckpointError` on every rank for a folder from which not even the weights can be read, with advice; for a
    checkpoint of another model; and for files that cannot be read.
    """
    problem, imported = None, Imported(program, weights=False)
    engine.zero_grad()  # gradients belong to the weights being replaced
    try:
        imported = _load(engine, directory, program)
        if engine.fragments is not None and not imported.optimizer:
            engine.fragments.start_anew()
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:  # raised on this rank alone, it would leave the other ranks waiting
        reason = str(error).splitlines()[0] if str(error) else ""
        problem = f"{directory}, written by {program}, cannot be read ({type(error).__name__}: {reason})"
    agree(engine.mesh.world, problem, CheckpointError)
    engine.sharded.weights_changed()
    return imported


def _load(engine: Stateful, directory: Path, program: str) -> Imported:
    if program == TRAINER:
        return _load_trainer(engine, directory)
    if program == FSDP_SHARDED:
        return _load_fsdp_sharded(engine, directory)
    if program == FSDP_FULL:
        return _load_fsdp_full(engine, directory)
    if program == UNIVERSAL:
        return _load_universal(engine, directory)
    if not any(_matches(directory, *_HF_WEIGHTS)):
        raise CheckpointError(
            f"{directory} is a checkpoint of DeepSpeed in the layout of its ranks; it is not read. Run `python zero_to_fp32.py "
            f". . --safe_serialization` in {directory} (DeepSpeed wrote the script there) to write the weights next to it, "
            "and resume again; or convert it with `ds_to_universal.py` to keep the optimizer's state."
        )
    note = "optimizer state of DeepSpeed's ranks: it starts empty (ds_to_universal.py makes it readable)"
    return Imported(DEEPSPEED, weights=False, notes=[note])


# ------------------------------------------------------------------------------------------------------------ programs


def _load_trainer(engine: Stateful, directory: Path) -> Imported:
    """Import `optimizer.pt`: torch's own state dict, which numbers the parameters across all param groups."""
    imported = Imported(TRAINER, weights=False)
    fragments = engine.fragments
    if fragments is None:
        return imported
    saved = load_file(directory / "optimizer.pt")
    names: dict[int, str] = {}
    for own, group in zip(fragments.param_names, saved["param_groups"], strict=False):
        if len(own) == len(group["params"]):
            names.update(zip(group["params"], own, strict=True))
    if len(names) != sum(map(len, fragments.param_names)):
        found = [len(g["params"]) for g in saved["param_groups"]]
        now = [len(own) for own in fragments.param_names]
        imported.notes.append(f"optimizer state: its param groups hold {found} parameters, this run's {now}")
        return imported
    state = {names[number]: values for number, values in saved["state"].items()}
    _take_optimizer(engine, state, saved["param_groups"], directory, imported)
    return imported


def _load_fsdp_sharded(engine: Stateful, directory: Path) -> Imported:
    source = DcpSource()
    source.add(directory / "pytorch_model_fsdp_0", "model.", lambda name: f"weights.{plain(name)}")
    imported = Imported(FSDP_SHARDED, weights=True)
    optimizer = directory / "optimizer_0"
    if engine.fragments is not None and optimizer.is_dir():
        source.add(optimizer, "optimizer.state.", optimizer_name)
        imported.optimizer = _fits(engine, source.stored, directory, imported)
        if imported.optimizer:
            imported.notes.append("weight decay and betas, which are this run's")
    _fill(engine, source, directory, imported)
    return imported


def _load_fsdp_full(engine: Stateful, directory: Path) -> Imported:
    file = directory / "pytorch_model_fsdp.bin"
    if not file.is_file():
        raise CheckpointError(
            f"{directory} holds FSDP's LOCAL_STATE_DICT, or files of single ranks, which only the same number of ranks can "
            "read. Save it with fsdp_state_dict_type SHARDED_STATE_DICT or FULL_STATE_DICT."
        )
    tensors = {f"weights.{plain(name)}": value for name, value in load_file(file).items()}
    imported = Imported(FSDP_FULL, weights=True)
    _fill(engine, MappedSource(tensors), directory, imported)
    optimizer = directory / "optimizer.bin"
    if engine.fragments is not None and optimizer.is_file():
        saved = load_file(optimizer)
        _take_optimizer(engine, saved["state"], saved["param_groups"], directory, imported)
    return imported


def _load_universal(engine: Stateful, directory: Path) -> Imported:
    zero = _universal_folder(directory)
    assert zero is not None
    shapes = _shapes(engine)
    imported = Imported(UNIVERSAL, weights=True, notes=["weight decay and betas, which are this run's"])
    tensors: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, object]] = {}
    step = _trainer_step(directory)
    for name in shapes:
        folder = zero / name
        if not (folder / "fp32.pt").is_file():
            continue  # `_fill` reports it
        tensors[f"weights.{name}"] = _universal_tensor(folder / "fp32.pt", shapes[name])
        own = {f.stem: _universal_tensor(f, shapes[name]) for f in sorted(folder.glob("exp_avg*.pt"))}
        file = folder / "step.pt"
        own_step = float(load_file(file)) if file.is_file() else step
        if own and own_step is not None:
            state[name] = {**own, "step": torch.tensor(own_step)}
    _fill(engine, MappedSource(tensors), directory, imported)
    if engine.fragments is not None and state:
        _take_optimizer(engine, state, [], directory, imported)
    elif engine.fragments is not None:
        imported.notes.append("optimizer state: the folder does not tell its step (no trainer_state.json)")
    return imported


# ----------------------------------------------------------------------------------------------------------- optimizer


def _take_optimizer(
    engine: Stateful,
    state: Mapping[str, Mapping[str, object]],
    groups: list[dict[str, object]],
    where: Path,
    imported: Imported,
) -> None:
    """Import optimizer state by parameter name, and the options of its param groups if they are known."""
    fragments = engine.fragments
    assert fragments is not None
    reason = _other_optimizer(fragments, groups)
    shapes = _shapes(engine)
    tensors: dict[str, torch.Tensor] = {}
    for long, values in state.items():
        name = plain(long)
        for key, value in values.items():
            if name not in shapes or value is None:
                continue
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
            # torch's own step counter is 0-dimensional, and a parameter may be, too, so only the name tells them apart.
            if tuple(tensor.shape) == shapes[name] and key != "step":
                tensors[f"optimizer.{key}.{name}"] = tensor
            elif tensor.numel() == 1 or fragments.sees_whole:
                tensors[f"optimizer_scalar.{key}.{name}"] = tensor
            else:
                reason = (
                    reason or f"{key} of {name} has shape {tuple(tensor.shape)} and cannot be cut like its parameter"
                )
    if reason is not None:
        imported.notes.append(f"optimizer state: {reason}")
        return
    source = MappedSource(tensors)
    imported.optimizer = _fits(engine, source.stored, where, imported)
    if not imported.optimizer:
        return
    _fill(engine, source, where, Imported(imported.program, weights=False, optimizer=True))
    for group, saved in zip(fragments.optimizer.param_groups, groups, strict=False):
        group.update({key: value for key, value in saved.items() if key not in _KERNEL_CHOICES})


def _other_optimizer(fragments: Optimizers, groups: list[dict[str, object]]) -> str | None:
    """The reason why state with the options of `groups` does not fit this optimizer; None if it does."""
    own = fragments.optimizer.param_groups
    if groups and len(groups) != len(own):
        return f"it has {len(groups)} param groups, this run's {len(own)}"
    for mine, theirs in zip(own, groups, strict=False):
        ignored = _KERNEL_CHOICES | {"initial_lr"}
        lacking = sorted(mine.keys() - theirs.keys() - ignored)
        if lacking:
            kind = kind_of(fragments.optimizer)
            return f"it is another optimizer's (this run's {kind} has {', '.join(lacking)})"
    return None


def _fits(engine: Stateful, stored: Stored, where: Path, imported: Imported) -> bool:
    """Whether the optimizer's states are of this optimizer; else a note says why. Raises `CheckpointError` if some are missing.

    Only torch's own state dict, which the stock Trainer writes, leaves out parameters that never had a gradient.
    """
    assert engine.fragments is not None
    optimizer = engine.fragments.optimizer
    kept: dict[str, set[str]] = {}
    for name in stored:
        kind, _, rest = name.partition(".")
        if kind in ("optimizer", "optimizer_scalar"):
            key, _, parameter = rest.partition(".")
            kept.setdefault(parameter, set()).add(key)
    found = set[str]().union(*kept.values())
    own = (state_names(optimizer) or frozenset()) - {"step"}
    if not found:
        imported.notes.append("optimizer state: there is none")
        return False
    if not own <= found:
        mine, theirs = (", ".join(sorted(keys)) or "nothing" for keys in (own, found - {"step"}))
        imported.notes.append(
            f"optimizer state: it is another optimizer's ({theirs}; this run's {kind_of(optimizer)} has {mine})"
        )
        return False
    shapes = _shapes(engine)
    trained = [name for names in engine.fragments.param_names for name in names if name in shapes]
    without = [n for n in trained if n not in kept or (len(shapes[n]) == 2 and not own <= kept[n])]
    if without and imported.program != TRAINER:
        raise CheckpointError(
            f"{where} holds the optimizer's state of {len(trained) - len(without)} parameters, this run trains "
            f"{len(trained)}: {first_of(without)} {'is' if len(without) == 1 else 'are'} missing. "
            "It was saved from another model, or files are missing. Copy it again, or load its weights with from_pretrained."
        )
    imported.states = f"{len(trained) - len(without)} of {len(trained)} parameters" if without else ""
    return True


def _fill(engine: Stateful, source: Source, where: Path, wanted: Imported) -> None:
    """Read this rank's part of the weights and of the optimizer state, according to `wanted`. Local."""
    stored = source.stored
    if wanted.weights:
        missing = missing_weights(engine.sharded.groups, stored, where)
        if missing:
            raise CheckpointError(
                f"{where} does not hold {min(missing)} ({len(missing)} parameters in all): it was saved from another model, "
                f"or only in part. Load what it has with from_pretrained, and start without resume_from_checkpoint."
            )
        names = sorted(name.removeprefix("weights.") for name in stored if name.startswith("weights."))
        refuse_unknown(engine.sharded.whole, names, where)
        buffers: dict[str, FlatSlice | torch.Tensor] = {
            f"weights.{name}": buffer
            for name, buffer in engine.sharded.model.named_buffers()
            if stored.get(f"weights.{name}", ((),))[0] == tuple(buffer.shape)
        }
        with torch.no_grad():
            fill_weights(engine.sharded.groups, stored, source.read)
            source.read(buffers)
    if wanted.optimizer and engine.fragments is not None:
        with torch.no_grad():
            for member in engine.fragments.members:
                fill_optimizer(member, stored, source.read)


def _shapes(engine: Stateful) -> dict[str, tuple[int, ...]]:
    return {slot.name: slot.held.whole for group in engine.sharded.groups for slot in group.layout.slots}


# ------------------------------------------------------------------------------------------------------------- folders


def _matches(directory: Path, *patterns: str) -> Iterator[Path]:
    return (path for pattern in patterns for path in directory.glob(pattern))


def _universal_folder(directory: Path) -> Path | None:
    """The `zero` folder of a universal checkpoint that is `directory` or lies in it: of several the one that DeepSpeed reads,
    named in `latest_universal`, else the one of the last step."""
    found = [p for p in (directory / "zero", *directory.glob("*/zero")) if any(p.glob("*/fp32.pt"))]
    latest = directory / "latest_universal"
    if latest.is_file() and (named := directory / latest.read_text(encoding="utf-8").strip() / "zero") in found:
        return named
    return max(found, key=lambda p: (p.parent == directory, _step_in(p.parent.name), p.parent.name), default=None)


def _step_in(name: str) -> int:
    number = re.search(r"\d+", name)
    return int(number[0]) if number else -1


def _universal_tensor(file: Path, shape: tuple[int, ...]) -> torch.Tensor:
    """The parameter's values, which stage 3 stores without their shape. Raises `CheckpointError` for another size."""
    saved = load_file(file)
    values: torch.Tensor = saved["param"] if isinstance(saved, dict) else saved
    if tuple(values.shape) == shape:
        return values
    if values.dim() != 1 or values.numel() != torch.Size(shape).numel():
        raise CheckpointError(
            f"{file}: {file.parent.name} has shape {tuple(values.shape)} there, but {shape} in the model. It was saved "
            "from another model."
        )
    return values.view(shape)


def _trainer_step(directory: Path) -> float | None:
    """Adam's step where the parameters' folders have none (stage 3): DeepSpeed stores it in a pickle of its own classes."""
    file = directory / "trainer_state.json"
    return float(json.loads(file.read_text(encoding="utf-8"))["global_step"]) if file.is_file() else None
