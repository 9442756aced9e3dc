"""Datasets that divide their rows among ranks themselves: a `StreamingDataset` of mosaicml-streaming, `split_dataset_by_node`.

The first has one order of all rows, gives each rank its part, and goes on from the number of rows that all ranks have had,
on any number of them. So a data rank has one lane, which is what the dataset gives it, and a state says how many rows that is.
The second cannot be put together again, and is refused.
"""

from __future__ import annotations

import inspect
from typing import Any

from hf_dist.errors import CheckpointError, ConfigError, Problem
from hf_dist.hf.streams.lanes import Place

__all__ = ["divided_again", "divides_rows", "refuse_other_loader", "refuse_wrong_division", "state_behind"]


def divides_rows(dataset: object) -> bool:
    """Whether the dataset gives each rank other rows, and its `state_dict` asks how many all ranks have had in the epoch."""
    method = getattr(dataset, "state_dict", None)
    return callable(method) and {"num_samples", "from_beginning"} <= set(inspect.signature(method).parameters)


def state_behind(dataset: Any, rows: int, *, in_pass: bool) -> dict[str, Any]:
    """The state behind `rows` of all ranks; without `in_pass` before the next pass. Local, equal on all ranks."""
    state: dict[str, Any] = dataset.state_dict(num_samples=rows, from_beginning=True)
    return state if in_pass else {**state, "epoch": state["epoch"] + 1}


def divided_again(place: Place, ranks: int) -> Place:
    """The place after as many rows, for `ranks` data ranks. Raises `CheckpointError` for rows that are not as many on each."""
    rows, rest = divmod(place.sum, ranks)
    if rest:
        raise CheckpointError(
            f"the checkpoint is behind {place.sum} rows of an epoch, which {ranks} data ranks cannot have had. Resume on a "
            "number of ranks that divides them: any with the same global batch."
        )
    return Place((rows,) * ranks, (None,) * ranks)


def refuse_wrong_division(dataset: Any, ranks: int, processes: int, rows: int, *, by_first: bool | None) -> None:
    """Raise `ConfigError` if what `dataset` gives a rank is not what the rank is to have: the next `rows` of each microbatch.

    `ranks`: with rows of their own. `by_first`: as `dispatch_batches`. Local.
    """
    _refuse_divided(dataset, processes)
    if not divides_rows(dataset):
        return
    name = f"a {type(dataset).__name__}"
    if ranks != processes or (getattr(dataset, "replication", None) or 1) > 1:
        raise ConfigError(
            Problem(
                "train_dataset",
                name,
                f"divides its rows among all {processes} processes itself, and {ranks} of them have rows of their own",
                "Set no pp, tp, cp and no replication, or use a dataset that does not divide its rows.",
            )
        )
    if by_first:
        raise ConfigError(
            Problem(
                "accelerator_config.dispatch_batches",
                "True",
                f"has rank 0 read for all, and {name} gives it its own rows only",
                "Leave it out: such a dataset goes on at any number of ranks.",
            )
        )
    size = getattr(dataset, "batch_size", None)
    if size is not None and size != rows:
        raise ConfigError(
            Problem(
                "train_dataset.batch_size",
                str(size),
                f"is how many rows {name} gives a rank in turn, and a microbatch has {rows}",
                f"Set batch_size={rows} there, as per_device_train_batch_size.",
            )
        )


def _refuse_divided(dataset: object, processes: int) -> None:
    """Raise `ConfigError` for a dataset of one rank's rows (`split_dataset_by_node`) on several processes. Local.

    Each would have a part of a part, and the other rows would never be read.
    """
    division = getattr(dataset, "_distributed", None)
    parts = getattr(division, "world_size", 1)
    if processes > 1 and parts > 1:
        raise ConfigError(
            Problem(
                "dataset",
                f"part {getattr(division, 'rank', '?')} of {parts}, by split_dataset_by_node,",
                f"cannot be divided again, and a run of {processes} processes divides the rows itself",
                "Pass the dataset as it was before split_dataset_by_node.",
            )
        )


def refuse_other_loader(dataset: object, processes: int) -> None:
    """Raise `ConfigError` for data that divide their rows and are not read in lanes, as in an evaluation. Local."""
    _refuse_divided(dataset, processes)
    if processes > 1 and divides_rows(dataset):
        raise ConfigError(
            Problem(
                "dataset",
                f"a {type(dataset).__name__}",
                f"divides its rows among the {processes} processes itself, which only training data of a Trainer may",
                "Use a dataset that does not divide its rows; in a loop of your own, "
                "DataLoaderConfiguration(use_stateful_dataloader=True).",
            )
        )
