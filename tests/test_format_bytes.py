"""Sizes in messages have three digits and the largest unit of which there is one."""

from __future__ import annotations

import re

import pytest

from hf_dist.format_bytes import scaled, seconds_text, size_text
from tests.test_architecture import python_files, relative


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (1_000, "1 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (1_240_000_000, "1.24 GB"),
        (80_000_000_000, "80 GB"),
        (3_500_000_000_000, "3.5 TB"),
        (-2_000_000, "-2 MB"),
    ],
)
def test_a_size_has_three_digits_and_never_an_exponent(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1250.4, "1250 s"),
        (12.36, "12.4 s"),
        (0.9999, "1 s"),
        (3.21e-3, "3.21 ms"),
        (45e-6, "45 µs"),
        (0.0, "0 µs"),
        (2e-8, "0.02 µs"),
    ],
)
def test_durations_have_a_unit_in_which_they_are_read(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_a_count_has_the_prefix_alone() -> None:
    assert [scaled(number) for number in (512, 37_000, 1_240_000_000)] == ["512 ", "37 k", "1.24 G"]


def test_nobody_else_writes_sizes_by_hand() -> None:
    by_hand = re.compile(r"/ ?(1e[369]|2 ?\*\* ?[123]0)\S*\} ?[kMGT]i?B\b(?!/s)")
    found = [relative(path) for path in python_files("hf_dist") if by_hand.search(path.read_text(encoding="utf-8"))]
    assert found == [], "use hf_dist.format_bytes.size_text"
