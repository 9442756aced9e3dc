"""Positions of data loaders in the states of a custom loop, for accelerate's `use_stateful_dataloader`.

Map-style data have one position for all ranks, in rows; so has a stream, with a state of each lane. Of other loaders of
torchdata each data rank has a state, while accelerate writes that of whichever rank comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderShard

from hf_dist.dist import collectives
from hf_dist.errors import CheckpointError, ConfigError, Problem
from hf_dist.hf.data import SeekableShard
from hf_dist.hf.plain_files import plain_file
from hf_dist.hf.streams.loader import stream_of
from hf_dist.log import warn_once

__all__ = [
    "load_states_of_loaders",
    "of_all_lanes",
    "refuse_wrong_positions",
    "states_of_loaders",
    "write_states_of_loaders",
]

_EPOCH = "_hf_dist_epoch"
_States = list[dict[int, dict[str, object]]]


def _stateful(accelerator: Any) -> list[Any]:
    return [each for each in accelerator._dataloaders if getattr(each, "use_stateful_dataloader", False)]


def refuse_wrong_positions(accelerator: Any) -> None:
    """Raise `ConfigError` where accelerate moves the state of a rank's own loader as if one rank read for all (before 1.13)."""
    asks = getattr(accelerator.dataloader_config, "use_stateful_dataloader", False)
    if asks and accelerator.num_processes > 1 and "adjust_state_dict_for_prefetch" not in vars(DataLoaderShard):
        raise ConfigError(
            Problem(
                "dataloader_config.use_stateful_dataloader",
                "True",
                f"resumes at other rows on several ranks in accelerate {accelerate.__version__}",
                "pip install 'accelerate>=1.13', or set it to False.",
            )
        )


def states_of_loaders(accelerator: Any) -> _States:
    """Per stateful loader: data rank -> its state after the last batch that the loop was given. Collective over world."""
    loaders = _stateful(accelerator)
    if not loaders:
        return []
    own = [{**loader.state_dict(), _EPOCH: loader.iteration} for loader in loaders]
    everyone = collectives.all_gather_object(accelerator.mesh.world, (accelerator.process_index, own))
    return [{rank: states[index] for rank, states in everyone} for index in range(len(loaders))]


def write_states_of_loaders(states: _States, folder: Path) -> None:
    """Write `dl_state_dict.bin`, `dl_state_dict_1.bin`, ... Local."""
    for index, of_ranks in enumerate(states):
        torch.save(of_ranks, folder / _name(index))


def load_states_of_loaders(accelerator: Any, folder: Path) -> None:
    """Have each stateful loader go on where the saved one stood. Local.

    Raises `CheckpointError` for a stream on another number of data ranks, whose states belong to one rank each, and for rows
    that are no whole batches now.
    """
    for index, loader in enumerate(_stateful(accelerator)):
        path, rank = folder / _name(index), accelerator.process_index
        if not path.exists():
            warn_once(f"{folder} has no position of data loader {index}: it begins with the first batch")
            continue
        of_ranks = plain_file(path)
        stream = stream_of(loader)
        if isinstance(loader, SeekableShard) or stream is not None:
            own = of_ranks.get(rank, of_ranks[0])
            if own.get("collator") is not None and len(of_ranks) != accelerator.num_processes:
                raise CheckpointError(
                    f"{path}: the collator kept rows for later on each of {len(of_ranks)} data ranks, there are "
                    f"{accelerator.num_processes} now. Load it on as many."
                )
            try:
                loader.load_state_dict(own if stream is None else of_all_lanes(own, of_ranks, path))
            except ConfigError as error:
                raise CheckpointError(f"{path}: {error}") from error
            continue
        if len(of_ranks) != accelerator.num_processes:
            raise CheckpointError(
                f"{path} has the positions of a stream on {len(of_ranks)} data ranks, there are {accelerator.num_processes} "
                "now. Load it on as many."
            )
        state = dict(of_ranks[rank])
        loader.iteration = state.pop(_EPOCH)
        loader.load_state_dict(state)


def of_all_lanes(own: dict[str, Any], of_ranks: Mapping[int, dict[str, Any]], path: Path) -> dict[str, Any]:
    """A stream's state with the lanes of all ranks; this rank's, where several have read the same one. Local.

    Raises `CheckpointError` for states of something else.
    """
    if any("states" not in state for state in of_ranks.values()):
        raise CheckpointError(
            f"{path} has no lanes: it was written with a hf_dist that did not know them. Load it with that one."
        )
    states: dict[int, Any] = {}
    for state in (*of_ranks.values(), own):
        states |= state["states"]
    return {**own, "states": states}


def _name(index: int) -> str:
    return f"dl_state_dict_{index}.bin" if index else "dl_state_dict.bin"
