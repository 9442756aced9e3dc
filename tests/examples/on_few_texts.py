"""Run an example on four packages of the standard library: to parse all of it costs every process two seconds.

python tests/examples/on_few_texts.py examples/no_trainer.py [its arguments]
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("http", "json", "logging", "urllib")


def main(script: str) -> None:
    """Its arguments are in `sys.argv`."""
    sys.path.insert(0, str(Path(script).resolve().parent))
    texts: Any = importlib.import_module("stdlib_docstrings")
    found = [path for name in PACKAGES for path in sorted((texts.stdlib_folder() / name).rglob("*.py"))]
    texts.stdlib_sources = lambda: list(found)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    del sys.argv[0]
    main(sys.argv[0])
