#!/usr/bin/env bash
# Installs the package with its test dependencies in a virtual environment, then runs every check.
#   bash tests/run.sh [pytest arguments]        e.g.  bash tests/run.sh -k config -x,  bash tests/run.sh -n 0 tests/dist/test_axes.py
# HF_DIST_VENV names the environment (default .venv in the repository); PYTHON the interpreter that makes it (3.10 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${HF_DIST_VENV:-.venv}"
[[ "$venv" = /* ]] || venv="$PWD/$venv"
python="${PYTHON:-python3}"
stamp="$venv/.hf_dist_installed"

# Install again only when the inputs change; a half-finished install leaves no stamp and is taken up again.
wanted="$("$python" - tests/constraints.txt pyproject.toml <<'PY'
import hashlib, os, sys

if sys.version_info < (3, 10):
    sys.exit(f"hf-dist needs Python 3.10 or newer, found {sys.version.split()[0]}; set PYTHON to a newer interpreter")
inputs = b"".join(open(path, "rb").read() for path in sys.argv[1:])
print(hashlib.sha256(f"{sys.version} {os.getcwd()}".encode() + inputs).hexdigest())
PY
)"
if [[ ! -x "$venv/bin/python" || ! -f "$stamp" || "$(cat "$stamp")" != "$wanted" ]]; then
    # An environment of another interpreter would keep its links to it, with the libraries of this one.
    clear=()
    which='import sys; print(sys.version, sys.base_prefix)'
    if [[ "$("$venv/bin/python" -c "$which" 2>/dev/null)" != "$("$python" -c "$which")" ]]; then clear=(--clear); fi
    "$python" -m venv ${clear[@]+"${clear[@]}"} "$venv"
    echo "*" >"$venv/.gitignore"
    "$venv/bin/python" -m pip install --quiet --only-binary :all: -c tests/constraints.txt -e ".[test,examples]"
    echo "$wanted" >"$stamp"
fi

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PATH="$venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE  # every worker and every process that a test starts would compile all of it again
ruff check .
codespell --skip "*/sweep/*.md,*/schema/*" --ignore-words-list fro,nd,te *.md configs examples hf_dist tests
ruff format --check .
mypy --num-workers 2 hf_dist || mypy hf_dist  # its workers have a few seconds to start, which a busy machine may not give
# Three workers: files that start ranks in one, others beside them, those that wait in the third (tests/order.py). -n 0 for one
# process. What fails is tried once more, alone (tests/second_try.py).
python -m tests.second_try -n 3 --dist loadfile "$@"
