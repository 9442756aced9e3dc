"""The version of the package, for whoever may not import it from above, and those of the libraries that it works with."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

__all__ = ["FLOORS", "REPOSITORY", "TESTED", "__version__", "check_versions", "untested"]

__version__ = "0.1.0"
REPOSITORY = "https://github.com/hf-dist/hf-dist"
"""Where the code will be published; README.md has it, too. The package's metadata, the documentation site and the schema's
`$id` are made of it."""
FLOORS = {"torch": "2.11", "transformers": "5.6", "accelerate": "1.3"}
"""Library -> oldest version, that of pyproject.toml (`tests/VERSIONS.md`). Before 5.6 transformers divides losses by other
counts; before 1.3 accelerate lacks an argument that transformers gives it."""
TESTED = {"torch": "2.14", "transformers": "5.24", "accelerate": "1.15"}
"""Library -> newest version that the tests have run with (`tests/VERSIONS.md`)."""


def untested(found: Mapping[str, str]) -> list[str]:
    """One sentence for each library that is newer than `TESTED`; a newer patch of a tested version is none.

    `found`: library -> installed version.
    """
    from packaging.version import Version

    return [
        f"{library} {found[library]} is newer than {newest}, the newest that hf_dist {__version__} was tested with"
        for library, newest in TESTED.items()
        if library in found and Version(found[library]).release[:2] > Version(newest).release[:2]
    ]


def check_versions() -> None:
    """Raise `ImportError` if an installed library is older than `FLOORS`: pip sees to it, a path that is only set does not."""
    from packaging.version import Version

    for library, floor in FLOORS.items():
        try:
            found = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:  # only on the path
            continue
        if Version(found) < Version(floor):
            raise ImportError(
                f"hf_dist needs {library} {floor} or newer, found {found}: pip install '{library}>={floor}'"
            )
