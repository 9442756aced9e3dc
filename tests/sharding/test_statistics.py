"""BatchNorm equals DDP's, `gathered` over stages, and what sizes of shard groups mean: on two and four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.sharding import statistics


def test_buffers_that_training_changes_are_those_of_ddp_on_every_rank(tmp_path: Path) -> None:
    expected = run_ranks(statistics.ddp, 2)
    (wanted, loss), _ = expected
    ranks = run_ranks(statistics.ours, 2, (str(tmp_path),))
    for rank in ranks:
        for name, found in rank.items():
            assert found["broadcasts"] == 2, "one per dtype: float and the count of batches"
            close = dict(rtol=1e-6, atol=1e-6) if name != "bf16" else dict(rtol=5e-2, atol=5e-2)
            for buffer, value in wanted.items():
                torch.testing.assert_close(found["buffers"][buffer], value, **close, msg=f"{name} {buffer}")
            assert found["loss"] == pytest.approx(loss, rel=1e-6 if name != "bf16" else 5e-2), name
            assert not torch.equal(found["saved"]["rows"], found["buffers"]["rows"])
            written = {n: b for n, b in found["written"].items() if n != "lookup"}  # each rank's own, in no file
            assert all(torch.equal(value, found["saved"][buffer]) for buffer, value in written.items())
            assert not torch.equal(found["ordinary"]["rows"], found["buffers"]["rows"])
    first, second = ranks
    for name, found in first.items():
        for kind in ("buffers", "saved", "ordinary"):
            for buffer, value in found[kind].items():
                if buffer == "lookup":  # a table for each rank's rows
                    continue
                assert torch.equal(value, second[name][kind][buffer]), (name, kind, buffer)


def test_statistics_of_every_stage_are_saved_from_the_first_data_rank(tmp_path: Path) -> None:
    saved = run_ranks(statistics.stages, 4, (str(tmp_path),))[0]
    (wanted, _), _ = run_ranks(statistics.ddp, 2, (False,))
    assert len(saved) == 8
    for name, value in saved.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


def test_small_groups_are_made_at_stage_3_only_and_the_report_says_what_a_second_copy_costs() -> None:
    found = run_ranks(statistics.small_groups, 4)
    for rank, results in enumerate(found):
        for stage in (1, 2) if FULL_GRID else (2,):
            plain = results[f"z{stage} "]
            for key in ("mics_shard_size", "zero_hpz_partition_size"):
                replicas, held, notes, told = results[f"z{stage} {key}"]
                assert (replicas, held) == plain[:2]
                assert f"zero_optimization.{key}" in notes
                assert not told
        for key, copies in (("mics_shard_size", 2), ("zero_hpz_partition_size", 1)):
            replicas, held, notes, told = results[f"z3 {key}"]
            assert replicas == copies
            assert f"zero_optimization.{key}" not in notes
            assert bool(told) == (key == "zero_hpz_partition_size" and rank == 0)


@pytest.mark.parametrize("tied", [False, True] if FULL_GRID else [True])  # other weights are apart in either
def test_the_modifier_of_each_stage_has_the_data_of_the_rank_that_was_named(tied: bool) -> None:
    found = run_ranks(statistics.modifiers, 4, (tied,))
    for rank, results in enumerate(found):
        stage = rank // 2

        def value(writer: int, name: str, rank: int = rank, results: dict = results) -> None:
            values, embed = results[name]
            assert values == {float(writer)}, (rank, name)
            if embed is not None and not tied:
                assert embed == {float(writer)}, (rank, name)

        value(2 * stage, "all-0")
        value(2 * stage + 1, "all-3")
        value(0 if stage == 0 else -1, "0-0")  # rank 0 holds nothing of stage 1
        value(2 if stage == 1 else -1, "2-2")
        value(-1, "1-0")  # discarded
        if tied:  # copies on both stages stay equal, whichever was written
            embeds = {name: results[name][1] for name in ("all-0", "all-3", "0-0", "2-2", "1-0")}
            assert embeds == {"all-0": {0.0}, "all-3": {1.0}, "0-0": {0.0}, "2-2": {2.0}, "1-0": {-1.0}}
        assert "modifier_rank: 4 is not a rank of this job" in results["4"]
        assert "modifier_rank: -1 is not a rank of this job" in results["-1"]
