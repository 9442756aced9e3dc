"""Each instrument must be able to fail: an engine from which one wait was taken out, and the line that is named then."""

from __future__ import annotations

import pytest

from tests.covering import some_of
from tests.gpu_sim import library
from tests.gpu_sim.server import simulate
from tests.gpu_sim.training import Report, Setting

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not()))

FP32 = Setting(stage=2, offload="optimizer", dtype="fp32", clipping=0.0)
"""The host asks for no norm, which would make it wait."""
FOUND: dict[str, tuple[Setting, str, str]] = {
    "the wait for gathered weights": (Setting(stage=3), "race", "all_gather"),
    "the wait before weights are freed": (Setting(stage=3), "early free", "sharding/full_weights.py"),
    "the wait for what is on its way to the host": (FP32, "race", "memory/offload/host.py"),
    "the wait for what is on its way to the device": (
        Setting(stage=2, offload="optimizer"),
        "race",
        "memory/offload/host.py",
    ),
    "the wait for a reduction": (Setting(stage=2), "race", "reduce_scatter"),
}
"""What is taken out -> where, and what the report must say."""
# The one that is freed too early is read too early, too; `test_trainers.py` has a race of the host.
FOUND = some_of(FOUND, "the wait before weights are freed")


@pytest.mark.parametrize("without", FOUND)
def test_a_wait_that_is_taken_out_is_found(without: str) -> None:
    setting, kind, named = FOUND[without]
    (found,) = simulate("tests.gpu_sim.training:train", setting, without)
    assert [fault for fault in found.faults if fault.startswith(kind) and named in fault], found.faults


def test_a_norm_that_is_read_is_named_by_its_line() -> None:
    found: Report = simulate("tests.gpu_sim.training:train", Setting(), "reading the norm only when it is asked for")[0]
    assert any("breakages.py" in wait for wait in found.waits), found.waits
