#!/usr/bin/env bash
# Runs the GPU tests in the active environment, on a machine with at least one GPU.
#   bash tests/run_gpu.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no GPU: torch.cuda.is_available() is False")'
python -m pytest tests/gpu -m gpu "$@"
