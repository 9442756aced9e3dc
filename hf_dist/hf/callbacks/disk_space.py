"""The size of a checkpoint, compared with the free space before the first step."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dist.checkpoint import folder
from hf_dist.checkpoint.model_files import weights_nbytes
from hf_dist.dist import collectives
from hf_dist.engine.engine import Engine
from hf_dist.errors import CheckpointError
from hf_dist.format_bytes import size_text
from hf_dist.log import say
from hf_dist.memory.offload.storage import MASTER_NBYTES
from hf_dist.planning.optimizer_states import OptimizerStates
from hf_dist.sharding.param_slice import held_slice

_AMPLE = 10
"""Nothing is said where this many times the space that is needed is free."""


class DiskSpaceCallback(TrainerCallback):
    """Raises `CheckpointError` when the checkpoints that `save_total_limit` keeps will not fit."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Rank 0, which owns the output folder, checks; every rank gets its answer. Collective."""
        trainer = self._trainer()
        engine = None if trainer is None else trainer.dist_engine
        if engine is None or args.save_strategy == "no":
            return
        nbytes = checkpoint_nbytes(engine, with_state=not args.save_only_model)
        limit = args.save_total_limit
        problem = None
        if engine.mesh.world.rank == 0:
            problem = _shortage(Path(args.output_dir or "."), nbytes, limit if limit and limit > 0 else None)
        problem = collectives.all_gather_object(engine.mesh.world, problem)[0]
        if problem is not None:
            raise CheckpointError(problem)


def checkpoint_nbytes(engine: Engine, *, with_state: bool) -> int:
    """Bytes of one checkpoint: the weights as they are stored, fp32 master weights and optimizer state."""
    plan = engine.model_files().plan
    nbytes = weights_nbytes(engine.sharded) if plan is None else plan.nbytes
    if with_state and engine.optimizer is not None:
        per_weight = MASTER_NBYTES + sum(OptimizerStates.of(engine.optimizer).elements)
        if engine.outer is not None:  # every replica has its own states; outer states are shared by all replicas
            own = per_weight - MASTER_NBYTES
            per_weight += own * (engine.outer.copies - 1) + MASTER_NBYTES * len(engine.outer.kinds)
        nbytes += (
            sum(held_slice(p).whole_numel for p in engine.sharded.whole.parameters() if p.requires_grad) * per_weight
        )
    return nbytes


def _shortage(root: Path, nbytes: int, limit: int | None) -> str | None:
    place = root
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    # During a write, all kept checkpoints exist as well; the first save needs room for one in any case.
    more = max(1, (limit or 0) + 1 - len(folder.numbered(root)))
    if nbytes * more * _AMPLE <= free:
        return None  # nothing to do, so nothing to say
    say(f"each checkpoint takes {size_text(nbytes)}; {size_text(free)} are free in {place}")
    if nbytes * more <= free:
        return None
    kept = f"save_total_limit={limit} keeps {limit} and writes one more" if limit else "one is needed"
    return (
        f"checkpoints will not fit: each takes {size_text(nbytes)}, {kept}, so {size_text(nbytes * more)} more are needed in "
        f"{place}, where {size_text(free)} are free. Free space, choose another output_dir, lower save_total_limit, or set "
        "save_only_model=True (no resume)."
    )
