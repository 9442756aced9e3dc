"""`python -m tests.sweep NAME [arguments]`: sweeps over many models, too long for the test run. NAME: a file of this folder."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Run the `main` of the sweep that is named first."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    importlib.import_module(f"tests.sweep.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
