"""The runner of Hugging Face's own tests, on two small files; and on a checkout, where `HF_DIST_HF_CHECKOUT` names one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
    found = columns_of(tmp_path, ["stock", "stage 1"], ["tests/test_small.py", "tests/absent.py"], [], 200)
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


@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not os.environ.get("HF_DIST_HF_CHECKOUT"), reason="HF_DIST_HF_CHECKOUT names no checkout of transformers"
)
def test_the_tests_of_a_checkout_differ_only_where_a_reason_is_given() -> None:
    checkout = Path(os.environ["HF_DIST_HF_CHECKOUT"]).absolute()
    found = columns_of(checkout, ["stock", "stage 1", "stage 3"], list(FILES), [], 3600)
    assert found["stock"]
    assert set(differences(found)) <= set(read_reasons(HERE))
