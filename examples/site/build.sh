#!/usr/bin/env bash
# Builds the documentation site: open examples/site/.output/index.html, from the disk or from any server.
#   bash examples/site/build.sh [arguments of "mkdocs build"]
# It installs the extra `site` into the environment of `python` (PYTHON names another one) if it is not there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python="${PYTHON:-python}"
"$python" -c "import material, mkdocstrings, hf_dist" 2>/dev/null || "$python" -m pip install --quiet -e ".[site]"
export NO_MKDOCS_2_WARNING=1 PYTHONPATH="$PWD"
# Not --quiet: with it mkdocs counts no warnings, and a strict build would pass.
exec "$python" -m mkdocs build --strict --config-file examples/site/mkdocs.yml "$@"
