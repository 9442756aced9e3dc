"""accelerate's own test functions, which it ships in `accelerate.test_utils.scripts`, in the ranks of one job.

Left out: those that want one process or GPUs (`test_noop_sync`, `join_uneven_inputs`), and so fail stock on two CPU ranks, too.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from tests.attempts import attempts
from tests.covering import FULL_GRID

_SCRIPT = """init_state_check process_execution_check test_split_between_processes_list test_split_between_processes_nested_dict
test_split_between_processes_tensor test_split_between_processes_evenly rng_sync_check dl_preparation_check
central_dl_preparation_check custom_sampler_check check_seedable_sampler check_seedable_sampler_with_data_seed
check_seedable_sampler_in_batch_sampler_shard test_trigger"""
_LOOP = """test_default_ensures_even_batch_sizes test_can_disable_even_batches test_pickle_accelerator"""
_OPS = """test_gather test_gather_object test_gather_non_contiguous test_broadcast test_pad_across_processes test_reduce_sum
test_reduce_mean test_reduce_max test_op_checker test_copy_tensor_to_devices"""
_METRICS = """test_gather_for_metrics_with_non_tensor_objects_iterable_dataset test_gather_for_metrics_with_iterable_dataset
test_gather_for_metrics_drop_last"""


HOW = list(itertools.product((False, True), repeat=3)) if FULL_GRID else [(False,) * 3, (True,) * 3]
"""Split batches, dispatched batches, a sync with each batch."""


def _module(name: str) -> Any:
    return importlib.import_module(f"accelerate.test_utils.scripts.{name}")


def _accelerator(**options: Any) -> Any:
    return importlib.import_module("accelerate").Accelerator(**options)


def functions() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and call of each."""
    script, sync = _module("test_script"), _module("test_sync")
    loop, ops, metrics = (
        _module("test_distributed_data_loop"),
        _module("test_ops"),
        _module("external_deps.test_metrics"),
    )
    for name in _SCRIPT.split():
        yield f"script.{name}", lambda name=name: (_accelerator(), getattr(script, name)())
    for seedable in (False, True):
        yield f"script.training_check-{seedable}", lambda on=seedable: (_accelerator(), script.training_check(on))
    yield "script.test_reinstantiated_state", script.test_reinstantiated_state
    yield "sync.test_dataloader_break", sync.test_dataloader_break
    for name in ("test_distributed_sync", "test_distributed_sync_multiple_fwd"):
        yield f"sync.{name}", lambda name=name: getattr(sync, name)(_accelerator())
    for how in HOW:
        for name in ("test_gradient_accumulation", "test_gradient_accumulation_with_opt_and_scheduler"):
            yield f"sync.{name}-{'-'.join(map(str, how))}", lambda name=name, how=how: getattr(sync, name)(*how)
    for name in _LOOP.split():
        yield f"loop.{name}", getattr(loop, name)
    for name in ("test_stateful_dataloader", "test_stateful_dataloader_save_state"):
        yield f"loop.{name}", lambda name=name: getattr(loop, name)(loop.create_accelerator())
    for name in _OPS.split():
        yield f"ops.{name}", lambda name=name: getattr(ops, name)(_state())
    for name in _METRICS.split():
        yield f"metrics.{name}", getattr(metrics, name)
    yield "metrics.test_torch_metrics", lambda: metrics.test_torch_metrics(_accelerator(), 512)


def _state() -> Any:
    _accelerator()
    return importlib.import_module("accelerate.state").PartialState()


def outcomes(
    rank: int, world: int, config: str | None, folder: str, names: Collection[str] | None = None
) -> dict[str, str]:
    """What each function raised, empty where it passed; stock without a config, else ours under the stock names.

    `names`: only these.
    """
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.chdir(folder)
    if config is not None:
        os.environ["HF_DIST_CONFIG"] = config
        importlib.import_module("hf_dist.hf.substitute").substitute()
    state = importlib.import_module("accelerate.state")

    def run(call: Callable[[], Any]) -> str:
        state.AcceleratorState._reset_state()
        state.GradientState._reset_state()
        torch.manual_seed(0)
        call()
        return ""

    calls = {name: call for name, call in functions() if names is None or name in names}
    found = attempts(rank, world, (functools.partial(run, call) for call in calls.values()))
    return {name: error.strip() for name, error in zip(calls, found, strict=True)}
