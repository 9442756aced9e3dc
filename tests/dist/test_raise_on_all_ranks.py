"""One rank's problem is everybody's, checksums see every bit and its place, and a writer goes with its engine."""

from __future__ import annotations

import gc
import signal
import weakref
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_dist.dist.mesh import MeshAxis
from hf_dist.dist.raise_on_all_ranks import together
from hf_dist.errors import CheckpointError
from hf_dist.tensors.checksum import as_bytes, batch_digest, checksum
from tests.harness import run_ranks


def problems(rank: int, world: int, root: str) -> dict[str, Any]:
    """What every rank hears when the last one fails; whether a writer is there after its engine."""
    from hf_dist.checkpoint.save import CheckpointWriter

    found, writer = _problems(rank, world, root)
    gc.collect()
    found["writer is gone"] = writer() is None
    assert CheckpointWriter._last is None or CheckpointWriter._last() is None
    return found


def _problems(rank: int, world: int, root: str) -> tuple[dict[str, Any], Any]:
    """In a block, interrupted in one, and in a save."""
    import hf_dist
    from hf_dist.checkpoint.save import SaveRequest
    from hf_dist.dist import collectives
    from hf_dist.dist.raise_on_all_ranks import agree, together
    from hf_dist.errors import CheckpointError

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    with torch.no_grad():
        if rank:  # the same values at other places
            model[0].weight.copy_(model[0].weight.flip(0).clone())
    engine = hf_dist.initialize(
        model,
        config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )
    axis, found = engine.mesh.world, {"weights": model[0].weight.detach().clone()}

    def heard(name: str, act: Any) -> None:
        try:
            act()
            found[name] = "nothing"
        except (CheckpointError, KeyboardInterrupt) as error:
            found[name] = f"{type(error).__name__}: {error}"
        assert collectives.all_gather_object(axis, rank) == [*range(world)], "the ranks are still in step"

    def block(error: BaseException) -> Any:
        def act() -> None:
            with together(axis, repr, CheckpointError):
                if rank == world - 1:
                    raise error

        return act

    heard("fine", lambda: agree(axis, None, CheckpointError))
    heard("said", lambda: agree(axis, f"no {rank}" if rank else None, CheckpointError, names_rank=True))
    heard("failed", block(OSError("disk")))
    heard("interrupted", block(KeyboardInterrupt()))

    def interrupted(working: Path) -> None:
        if rank == world - 1:
            raise KeyboardInterrupt

    def save() -> None:
        request = SaveRequest(final=Path(root) / "broken", files=engine.model_files(), on_every_rank=interrupted)
        engine.writer.save(engine, request)

    heard("save", save)
    engine.save_checkpoint(Path(root) / "whole")
    return found, weakref.ref(engine.writer)


def test_a_failure_or_an_interrupt_on_one_rank_reaches_all(tmp_path: Path) -> None:
    first, last = run_ranks(problems, 2, (str(tmp_path),))
    for rank in (first, last):
        assert rank["fine"] == "nothing"
        assert rank["said"] == "CheckpointError: rank 1: no 1"
        assert rank["failed"] == "CheckpointError: rank 1: OSError('disk')"
    assert first["interrupted"] == "CheckpointError: rank 1: it was interrupted (KeyboardInterrupt)"
    assert "broken could not be written (rank 1: it was interrupted (KeyboardInterrupt))" in first["save"]
    assert last["interrupted"].startswith("KeyboardInterrupt")
    assert last["save"].startswith("KeyboardInterrupt")
    assert first["writer is gone"], "its mesh and its copies of all states would stay"
    assert last["writer is gone"]
    assert torch.equal(first["weights"], last["weights"]), "permuted values are other values"


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(1, 3), signals=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["SIGINT", "SIGTERM"])), max_size=3),
    fails=st.integers(0, 9),
)  # fmt: skip
def test_a_signal_waits_for_the_end_of_the_outermost_block_and_a_second_one_does_not(
    depth: int, signals: list[tuple[int, str]], fails: int
) -> None:
    """Whatever comes at which line of the block, nested or not, and whether the block fails by itself."""
    done, heard = 0, list[str]()

    def handler(number: int, _: Any) -> None:
        heard.append(f"{signal.Signals(number).name} after {done}")
        raise KeyboardInterrupt

    def block() -> None:
        nonlocal done
        for line in range(6):
            for _ in [name for at, name in signals if at == line]:
                signal.raise_signal(signal.Signals[_])
            if line == fails:
                raise OSError("disk")
            done += 1

    def nested(level: int) -> None:
        with together(MeshAxis("alone", 1, 0, None), str, CheckpointError):
            nested(level - 1) if level else block()

    before = [signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        nested(depth)
        raised: type[BaseException] | None = None
    except (KeyboardInterrupt, CheckpointError) as error:
        raised = type(error)
    finally:
        after = [signal.signal(n, old) for n, old in zip((signal.SIGINT, signal.SIGTERM), before, strict=True)]
    assert after == [handler, handler], "given back"
    came = [name for at, name in sorted(signals, key=lambda one: one[0]) if at <= fails]
    twice = next((i for i, name in enumerate(came) if name in came[:i]), None)
    if not came:
        assert raised is (CheckpointError if fails < 6 else None) and done == min(fails, 6)
    elif twice is None:
        assert raised is KeyboardInterrupt and done == min(fails, 6), "the block came to its end"
    else:
        assert raised is KeyboardInterrupt
        assert heard[0].startswith(came[twice]), "the second of a kind acts at once"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_a_checksum_depends_on_every_element_and_its_place_and_on_nothing_else(dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (70_003, 3), generator=torch.Generator().manual_seed(0)).to(dtype)
    values[0, 0], values[-1, -1] = 1, 0
    own = int(checksum(values))
    assert own == int(checksum(torch.cat([values[:1], values])[1:])), "alignment"
    assert own == int(checksum(values.T.contiguous().T)), "strides"
    turned = values.clone()
    turned[0, 0], turned[-1, -1] = 0, 1
    assert own != int(checksum(turned))
    assert len({int(checksum(torch.zeros(n, dtype=dtype))) for n in range(9)}) == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3, 2), (0, 4), (1, 5)])
def test_the_bytes_of_a_view_are_those_of_its_elements(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A single element or row of a wider tensor is contiguous to torch, which cannot show its bytes."""
    wide = torch.randint(0, 2, (7 * 7 * 3,), generator=torch.Generator().manual_seed(0)).to(dtype)
    for strides in ([7, 3], [3, 7], [7, 7], [2, 1]):
        view = wide.as_strided(shape, strides[: len(shape)], 1)
        expected = torch.tensor(view.flatten().tolist(), dtype=dtype).view(torch.uint8)
        assert torch.equal(as_bytes(view), expected)
        assert int(checksum(view)) == int(checksum(view.flatten().clone()))


def test_the_digest_of_a_window_sees_the_end_the_order_and_large_integers() -> None:
    ids = torch.randint(0, 1 << 60, (4, 9_000), generator=torch.Generator().manual_seed(0))
    window = [{"input_ids": ids, "weights": torch.rand(5)}, {"input_ids": ids + 1}]
    own = batch_digest(window)
    assert own.dtype == torch.float64
    assert torch.equal(own, batch_digest([{k: v.clone() for k, v in batch.items()} for batch in window]))

    def changed(ids: torch.Tensor) -> bool:
        return not torch.equal(own, batch_digest([window[0] | {"input_ids": ids}, window[1]]))

    last = ids.clone()
    last[-1, -1] += 1
    assert changed(last)
    assert changed(ids.flip(1))
    assert changed(ids[[1, 0, 2, 3]])
    assert not torch.equal(own, batch_digest(window[::-1]))
    assert torch.equal(own, batch_digest([UserDict(batch) for batch in window])), "a tokenizer's batch is no dict"
