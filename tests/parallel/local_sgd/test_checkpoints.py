"""A checkpoint at a meeting is exact: resumed on another layout, with more or fewer replicas, the run equals the emulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.covering import some_of
from tests.harness import run_ranks
from tests.parallel.local_sgd.emulation import Work, emulate
from tests.parallel.local_sgd.on_ranks import Layout, parts_of, run_parts
from tests.parity.train import relative

DILOCO: dict[str, Any] = dict(every=2, outer_lr=0.7, momentum=0.9, nesterov=True)
STREAMING: dict[str, Any] = {**DILOCO, "every": 3, "fragments": 2, "overlap": 1, "mix": 0.5, "steps": 7}
"""A fragment is on its way when the checkpoint is made."""
AT = 4
PAIRS: dict[str, tuple[Work, tuple[int, Layout], tuple[int, Layout]]] = {
    "same": (Work(**DILOCO), (4, Layout(3, 2)), (4, Layout(3, 2))),
    "other shards": (Work(**DILOCO), (4, Layout(3, 2)), (2, Layout(1))),
    "from the host to the device": (Work(**DILOCO, lora=True), (4, Layout(2, 2, "cpu")), (2, Layout(3))),
    "a replica less": (Work(**DILOCO, later=(AT, 1)), (4, Layout(3, 2)), (2, Layout(3, 2))),
    "two replicas more": (Work(**DILOCO, later=(AT, 4)), (2, Layout(0)), (4, Layout(2))),
    "streaming": (Work(**STREAMING, later=(AT, 2)), (4, Layout(3, 2)), (2, Layout(1))),
    "streaming, two replicas more": (Work(**STREAMING, later=(AT, 4)), (2, Layout(0)), (4, Layout(2))),
    "mean of weights": (Work(every=2), (2, Layout(1)), (4, Layout(3, 2))),
}
"""Name -> work, layout that saves, layout that resumes; each with its ranks."""
SAVED_WHOLE = "a replica less"
PAIRS = some_of(PAIRS, SAVED_WHOLE, "from the host to the device", "streaming, two replicas more")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the ranks that resumed gave; a spawn for each number of ranks that saves, or resumes."""
    root = tmp_path_factory.mktemp("meetings")
    folders = {name: str(root / str(i)) for i, name in enumerate(PAIRS)}
    found: dict[str, list[Any]] = {}
    for which in (1, 2):
        for world in (2, 4):
            names = [name for name, pair in PAIRS.items() if pair[which][0] == world]  # type: ignore[misc]
            how = [
                {"steps": (1, AT), "save": folders[n]} if which == 1 else {"steps": (AT + 1, 0), "load": folders[n]}
                for n in names
            ]
            parts = [(PAIRS[n][0], PAIRS[n][which][1], h) for n, h in zip(names, how, strict=True)]  # type: ignore[misc]
            ranks = run_ranks(run_parts, world, (parts,))
            for i, name in enumerate(names):
                found[name] = [rank[i] for rank in ranks]
                for outcome in found[name]:
                    assert not isinstance(outcome, str), outcome
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_a_run_that_resumes_at_a_meeting_equals_the_one_that_did_not_stop(
    name: str, outcomes: dict[str, list[Any]]
) -> None:
    work, _, (world, layout) = PAIRS[name]
    expected = emulate(work, parts_of(outcomes[name]) if work.streams else ())
    for replica in range(world // layout.shard):
        here = outcomes[name][replica * layout.shard : (replica + 1) * layout.shard]
        losses = [sum(rank["losses"][i] for rank in here) for i in range(work.steps - AT)]
        assert losses == pytest.approx([row[replica] for row in expected["losses"][AT:]], rel=1e-5)
    for outcome in outcomes[name]:
        for parameter, weight in outcome["weights"].items():
            assert relative(weight, expected["weights"][parameter]) < 1e-5, parameter


def test_a_checkpoint_has_one_name_for_every_state(outcomes: dict[str, list[Any]], tmp_path_factory: Any) -> None:
    from hf_dist.checkpoint import dcp, folder

    saved = next(Path(tmp_path_factory.getbasetemp()).glob(f"meetings*/{list(PAIRS).index(SAVED_WHOLE)}"))
    names = dcp.stored_tensors(saved / folder.STATE)
    weights = {name.partition(".")[2] for name in names if name.startswith("weights.")}
    for kind in ("optimizer.exp_avg", "replica.1.optimizer.exp_avg", "outer.momentum"):
        assert {name.removeprefix(f"{kind}.") for name in names if name.startswith(f"{kind}.")} == weights, kind
