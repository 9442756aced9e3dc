#!/usr/bin/env bash
# The tests of tests/gpu in the active environment, in four calls of at most eight minutes, the most telling first. A call goes on
# where the last one of its name has stopped, and ends with a table; figures go to tests/gpu/RESULTS.md and, as JSON, to $OUT.
#   bash tests/run_gpu.sh [one|ranks|speed|simulated] [--again] [pytest arguments]      without a name: all four, one after the other
# Says first which packages are missing. Without a GPU it says so and ends well; HF_DIST_REHEARSE=1 runs it on the CPU, smaller.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Ranks are forks of a server that has torch loaded. In this way torch counts GPUs without CUDA, which is not to be forked.
export PYTORCH_NVML_BASED_CUDA_CHECK=1
exec "${PYTHON:-python}" -m tests.gpu.calls "$@"
