"""What one process computes is computed once per run: by key, for every file and worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import references
from tests.references import shared


def test_a_result_is_computed_once_and_found_by_other_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(references.FOLDER, str(tmp_path))
    counted: list[str] = []

    def compute(name: str) -> dict[str, list[float]]:
        counted.append(name)
        return {name: [1.5]}

    assert shared(("a", 1), lambda: compute("a")) == {"a": [1.5]}
    assert shared(("a", 1), lambda: compute("again")) == {"a": [1.5]}
    references._known.cache_clear()  # another worker knows the folder only
    assert shared(("a", 1), lambda: compute("there")) == {"a": [1.5]}
    assert shared(("a", 2), lambda: compute("b")) == {"b": [1.5]}
    assert counted == ["a", "b"]


def test_a_failure_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(references.FOLDER, str(tmp_path))

    def fail() -> None:
        raise ValueError("no result")

    for _ in range(2):
        with pytest.raises(ValueError, match="no result"):
            shared("failing", fail)
    assert list(tmp_path.iterdir()) == []
