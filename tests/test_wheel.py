"""What an installation adds to an environment: one package with its configs, one command, and nothing that runs by itself."""

from __future__ import annotations

import filecmp
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest

from hf_dist.config import json_schema
from hf_dist.version import REPOSITORY, __version__
from tests import processes
from tests.harness import ROOT

BUILT_FROM = ("hf_dist", "configs", "pyproject.toml", "README.md", "LICENSE")


def pip(*words: str | Path) -> None:
    """Run pip of this environment, without an index."""
    done = processes.run(
        [sys.executable, "-m", "pip", *map(str, words), "--disable-pip-version-check"],
        timeout=200, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def below(folder: Path) -> set[str]:
    """Files, without compiled ones."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"}


def test_an_installation_adds_one_package_and_one_command_and_takes_them_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, fresh = tmp_path / "source", tmp_path / "fresh"
    source.mkdir()
    for name in BUILT_FROM:
        place = Path(ROOT, name)
        copy = shutil.copytree if place.is_dir() else shutil.copy
        copy(place, source / name)  # type: ignore[operator]
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source)
    venv.create(fresh, with_pip=False)
    before = below(fresh)
    python, wheel = fresh / "bin" / "python", next(tmp_path.glob("*.whl"))
    pip("--python", python, "install", "--no-deps", "--no-index", "--no-compile", wheel)
    added = below(fresh) - before
    site = next(fresh.glob("lib/python*/site-packages"))
    tops = {Path(name).relative_to(site.relative_to(fresh)).parts[0] for name in added if "site-packages" in name}
    (info,) = {top for top in tops if top.endswith(".dist-info")}
    assert tops == {"hf_dist", info}
    assert {name for name in added if "site-packages" not in name} == {"bin/hf-dist"}
    (installed,) = distributions(path=[str(site)])
    assert {(entry.group, entry.name) for entry in installed.entry_points} == {("console_scripts", "hf-dist")}
    check_data(site / "hf_dist", monkeypatch)
    check_metadata(installed)
    pip("--python", python, "uninstall", "--yes", "hf-dist")
    assert below(fresh) == before


def check_data(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module and config of the repository is in the installed `package`, which finds its schema and has typed names."""
    assert {name for name in below(package) if name.endswith(".py")} == {
        name for name in below(Path(ROOT, "hf_dist")) if name.endswith(".py")
    }
    configs = below(Path(ROOT, "configs"))
    assert filecmp.cmpfiles(package / "configs", Path(ROOT, "configs"), configs, shallow=False)[0] == list(configs)
    assert (package / "py.typed").is_file()
    monkeypatch.setattr(json_schema, "__file__", str(package / "config" / "json_schema.py"))
    assert json_schema.schema_file() == package.resolve() / "configs" / "schema" / "hf_dist.schema.json"


def check_metadata(installed: Distribution) -> None:
    """Addresses come from one constant; the page of the index has no link into nowhere; releases have a section."""
    assert installed.version == __version__
    named = installed.metadata.get_all("Project-URL") or []
    urls = dict(line.split(", ", 1) for line in named)
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(REPOSITORY) for url in urls.values())
    page = installed.metadata.get_payload()
    assert isinstance(page, str) and page.startswith("# hf_dist")
    assert f"git clone {REPOSITORY} " in page
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert targets and all(re.match("https://|#", target) for target in targets)
    inside = [url.partition("/main/")[2].partition("#")[0] for url in [*targets, *urls.values()] if "/main/" in url]
    assert [name for name in inside if not Path(ROOT, name).exists()] == []
    assert f"\n## {__version__}" in Path(ROOT, "CHANGELOG.md").read_text(encoding="utf-8")


def test_no_other_package_loads_this_one() -> None:
    """Of this environment, in which the package is installed in place."""
    groups = {entry.group for entry in distribution("hf-dist").entry_points}
    assert groups == {"console_scripts"}
