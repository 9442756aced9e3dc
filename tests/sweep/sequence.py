"""Which HF classes train with their sequences split over two ranks as in one process: every causal and masked class.

    python -m tests.sweep sequence [--only PATTERN] [--seconds N] [--results FILE] [--write]

See `sharding.py`, whose ranks it uses; here both read the same rows, of a length that does not divide.
"""

from __future__ import annotations

from pathlib import Path

from tests.sweep.sharding import run

TABLE = Path(__file__).parent / "SEQUENCE.md"
SETTING = (
    "sequences of 10 and 12 tokens (some padded) split over two ranks at stage 3. Equal: losses, gradient norms and every "
    "weight after two steps of AdamW within 1e-5 of one process's, relative (the number is the worst). Refused: an error that "
    "names the reason, before training."
)


def main(arguments: list[str]) -> None:
    """Run the sweep and print the table."""
    run(arguments, "sequence", TABLE, SETTING, {"sequence_parallel_size": 2}, ("causal", "masked"))
