"""What pyproject.toml cannot say: `configs/` is installed as `hf_dist/configs`; addresses are written in one place."""

import re
import runpy
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).resolve().parent
REPOSITORY = runpy.run_path(str(HERE / "hf_dist" / "version.py"))["REPOSITORY"]
PAGES = f"{REPOSITORY}/blob/main"
FILES = f"{REPOSITORY}/raw/main"
"""Pictures are shown from here."""


def absolute(markdown: str) -> str:
    """A page of the repository's top folder with links that lead there from anywhere."""
    relative = r"\]\((?!\w+:|#)([^)\s]+)\)"
    pictures = re.sub(rf"(!\[[^\]]*){relative}", rf"\1]({FILES}/\2)", markdown)
    return re.sub(relative, rf"]({PAGES}/\1)", pictures)


if __name__ == "__main__":
    setup(
        packages=[*find_namespace_packages(include=["hf_dist*"]), "hf_dist.configs"],
        package_dir={"hf_dist.configs": "configs"},
        package_data={"hf_dist": ["py.typed"], "hf_dist.configs": ["*.json", "README.md", "schema/*.json"]},
        long_description=absolute((HERE / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
        project_urls={
            "Repository": REPOSITORY,
            "Documentation": f"{PAGES}/README.md",
            "Changelog": f"{PAGES}/CHANGELOG.md",
            "Issues": f"{REPOSITORY}/issues",
        },
    )
