"""The runner of Hugging Face's own tests, on two small files; and on a checkout, where `HF_DIST_HF_CHECKOUT` names one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.covering import FULL_GRID
from tests.ecosystem import hf_distributed
from tests.ecosystem.hf_suite import FILES, HERE, Outcome, columns_of, differences, read_reasons, table

SUITE = """
import unittest
from transformers import GoneSinceLongAgo, Trainer

class Tests(unittest.TestCase):
    def test_of_the_class(self):
        self.assertEqual(Trainer.__name__, "Trainer")

    def test_equal(self):
        self.assertTrue(issubclass(Trainer, object))

    def test_of_what_is_gone(self):
        self.assertIsInstance(GoneSinceLongAgo, int)
"""


@pytest.mark.timeout(300)
def test_a_test_that_passes_stock_and_not_under_us_is_listed(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_small.py").write_text(SUITE)
    found = columns_of(
        tmp_path, ["stock", "stage 1"], ["tests/test_small.py", "tests/absent.py"], [], 200, is_real=FULL_GRID
    )
    assert {name: outcome.result for name, outcome in found["stock"].items()} == {
        "Tests.test_of_the_class": "passed", "Tests.test_equal": "passed", "Tests.test_of_what_is_gone": "failed",
    }  # fmt: skip
    assert found["stage 1"]["Tests.test_of_the_class"] == Outcome(
        "failed", "AssertionError: 'DistTrainer' != 'Trainer'"
    )
    assert differences(found) == ["Tests.test_of_the_class"]
    assert "| `Tests.test_of_the_class` | failed | by name |" in table(found, {"Tests.test_of_the_class": "by name"})


def test_every_listed_difference_has_a_reason() -> None:
    reasons = read_reasons(HERE)
    assert len(reasons) > 5
    assert not [test for test, reason in reasons.items() if not reason or "NOT EXPLAINED" in reason]


def test_what_scripts_write_is_compared_entry_by_entry() -> None:
    stock = hf_distributed.flat({"log": [{"loss": 1.0}, {"loss": 2.0}], "step": 2}, "state")
    assert stock == {"state.log.0.loss": 1.0, "state.log.1.loss": 2.0, "state.step": 2}
    assert hf_distributed.difference({**stock, "state.log.0.loss": 1.00001, "ours": 3}, stock) == "equal: 3 values"
    assert hf_distributed.difference({**stock, "state.log.1.loss": 2.001}, stock).startswith(
        "differs: state.log.1.loss"
    )
    assert hf_distributed.difference({"state.log.0.loss": 1.0}, stock).startswith("differs")


CHECKOUT = pytest.mark.skipif(
    not os.environ.get("HF_DIST_HF_CHECKOUT"), reason="HF_DIST_HF_CHECKOUT names no checkout of transformers"
)


@pytest.mark.timeout(1800)
@CHECKOUT
@pytest.mark.parametrize("name", hf_distributed.CASES)
def test_the_scripts_of_a_checkout_do_on_two_ranks_what_they_do_under_ddp(name: str, tmp_path: Path) -> None:
    checkout = Path(os.environ["HF_DIST_HF_CHECKOUT"]).absolute()
    if not (checkout / hf_distributed.SCRIPTS).is_dir():
        pytest.skip("the checkout is older than 5.3")
    found = hf_distributed.outcome(checkout, name, ["stage 1", "stage 3"], tmp_path)
    assert found.pop("stock") == "ended well"
    assert all(outcome.startswith(("equal", "ended well")) for outcome in found.values()), found


@pytest.mark.timeout(3600)
@CHECKOUT
def test_the_tests_of_a_checkout_differ_only_where_a_reason_is_given() -> None:
    checkout = Path(os.environ["HF_DIST_HF_CHECKOUT"]).absolute()
    found = columns_of(checkout, ["stock", "stage 1", "stage 3"], list(FILES), [], 3600)
    assert found["stock"]
    assert set(differences(found)) <= set(read_reasons(HERE))
