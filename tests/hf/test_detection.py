"""A loss that counts boxes over all processes itself: the numbers of one process, or a refusal by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.hf import detection


def test_two_ranks_count_boxes_once_and_a_pipeline_is_refused(tmp_path: Path) -> None:
    wanted = detection.trained(0, 1, str(tmp_path / "stock"), None)
    for found in run_ranks(detection.on_ranks, 2, (str(tmp_path),)):
        for step, one in zip(found["stage 1"], wanted, strict=True):
            assert step == pytest.approx(one, rel=1e-4)
        assert "the loss of DetrForObjectDetection counts boxes" in found["stages"]
