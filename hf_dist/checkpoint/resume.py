"""Loads a checkpoint into an engine of any layout: every rank reads its part, and an error on one rank is raised on all."""

from __future__ import annotations

import os
from pathlib import Path

from hf_dist.checkpoint import folder, random_state
from hf_dist.checkpoint.file_sums import damaged_files
from hf_dist.checkpoint.model_files import read_plan, read_weights
from hf_dist.checkpoint.publish import finish
from hf_dist.checkpoint.training_state import Stateful, load_state, read_rank_values
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.dist.raise_on_all_ranks import agree, together
from hf_dist.errors import CheckpointError
from hf_dist.log import warn_once


def load_checkpoint(engine: Stateful, directory: Path, *, weights_only: bool = False) -> set[str]:
    """Restore master weights, optimizer, schedule, scaler and counters. Collective: every rank.

    Returns the trainable parameters that the training state lacks (they were frozen when it was saved). Raises
    `CheckpointError` on every rank.
    """
    missing: set[str] = set()
    problem = None
    engine.zero_grad()  # gradients belong to the weights being replaced
    if engine.outer is not None:
        engine.outer.before_load()
    with together(engine.mesh.world, str, CheckpointError):
        if engine.mesh.world.rank == 0:
            finish(Path(os.path.abspath(directory)))  # a save into this folder that was cut off
    try:
        check_readable(directory)
    except CheckpointError as error:
        problem = str(error)
    agree(engine.mesh.world, problem, CheckpointError)
    if engine.verifies_checkpoints:
        check_bytes(directory, engine.mesh)
    try:
        missing = load_state(engine, directory / folder.STATE, weights_only=weights_only)
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:  # raised on this rank alone, it would leave the other ranks waiting
        problem = f"{directory / folder.STATE} cannot be read ({type(error).__name__}: {str(error).splitlines()[0]})"
    agree(engine.mesh.world, problem, CheckpointError)
    engine.sharded.weights_changed()
    if engine.outer is not None:
        engine.outer.restart()
    return missing


def load_whole_checkpoint(engine: Stateful, directory: Path, *, weights_only: bool = False) -> None:
    """`load_checkpoint`, plus the weights that the training state lacks, from the model files beside it.

    The training state lacks weights that were frozen at the save. Collective: every rank. Raises `CheckpointError` on every
    rank if a trainable parameter is in neither. An adapter's base is in neither, and stays as it is.
    """
    missing = load_checkpoint(engine, directory, weights_only=weights_only)
    problem = None
    try:
        plan = read_plan(directory)
        held = set(plan.by_param) if plan is not None else set()
        if missing - held:
            raise CheckpointError(
                f"{directory} does not hold {min(missing - held)} ({len(missing - held)} trainable parameters in all): it was "
                "saved from another model, or before these parameters were added"
            )
        frozen = {s.name for g in engine.sharded.groups if not g.trainable for s in g.layout.slots}
        if plan is not None:
            read_weights(directory, plan, engine.sharded, (frozen & held) | missing)
    except (OSError, CheckpointError, KeyError) as error:
        problem = str(error) if isinstance(error, CheckpointError) else f"{directory}: {type(error).__name__}: {error}"
    agree(engine.mesh.world, problem, CheckpointError)
    engine.sharded.weights_changed()
    for each in engine.beside:
        each.load(directory, weights_only=weights_only)


def check_readable(directory: Path) -> None:
    """Raise `CheckpointError` unless `directory` is a complete checkpoint with training state. Local."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} does not exist")
    manifest = folder.read_manifest(directory)
    if manifest is None or not (directory / folder.STATE).is_dir():
        raise CheckpointError(
            f"{directory} holds no training state of hf_dist. Its weights can be loaded with "
            f"from_pretrained({str(directory)!r})."
        )
    if changed := folder.edited(directory):
        warn_once(
            f"{directory}: {', '.join(changed[:5])} changed since the checkpoint was written; the resume does not depend on it"
        )
    problems = folder.incomplete(directory)
    if problems:
        raise CheckpointError(
            f"{directory} is not complete: {'; '.join(problems[:3])}. Resume from an older checkpoint "
            '(resume_from_checkpoint="auto" finds the newest complete one).'
        )


def check_bytes(directory: Path, mesh: ParallelMesh) -> None:
    """Raise `CheckpointError` on every rank unless all files hold the bytes that were written; the ranks share the reading.

    Collective over all ranks. Checkpoints of older versions have no digests, and pass.
    """
    damaged = damaged_files(directory, folder.written(directory), mesh)
    if damaged:
        more = f" and {len(damaged) - 1} more files" if len(damaged) > 1 else ""
        raise CheckpointError(
            f"{directory / damaged[0]}{more}: not the bytes that were written. The size is right, the digest is not that in "
            f"{folder.MANIFEST}: a disk or a copy has changed it. Copy the checkpoint again, or resume from an older one; "
            f"`hf-dist checkpoint verify {directory.parent}` tells which are whole."
        )


def restore_random_state(mesh: ParallelMesh, directory: Path, *, seed: int, step: int) -> None:
    """Restore this rank's random generators. A rank that did not exist at the save gets a newly derived state. Local."""
    values = read_rank_values(directory / folder.STATE, draws_like(mesh))
    if values:
        random_state.restore(values)
    else:
        random_state.derive(seed, step, draws_like(mesh))


def draws_like(mesh: ParallelMesh) -> int:
    """The rank whose saved generators this rank restores: the first rank that reads the same rows, so that they draw alike.

    In the layout that saved the checkpoint, these ranks may have read different rows.
    """
    return mesh.axes.line("batch", mesh.world.rank)[0]
