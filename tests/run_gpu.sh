#!/usr/bin/env bash
# Runs the tests of tests/gpu in the active environment, on as many GPUs as there are, and the benchmark, within ten minutes on
# one GPU; says what it could not run, and writes the figures into tests/gpu/RESULTS.md. Without a GPU it says so and ends well.
#   bash tests/run_gpu.sh [pytest arguments]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Ranks are forks of a server that has torch loaded. In this way torch counts GPUs without CUDA, which is not to be forked.
export PYTORCH_NVML_BASED_CUDA_CHECK=1
unset ACCELERATE_USE_CPU
count="$(python -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')" || exit 1
if [[ "$count" = 0 ]]; then
    echo "no GPU: torch.cuda.is_available() is False. Nothing was run; a rehearsal on the CPU is a part of tests/run.sh."
    exit 0
fi
echo "$count GPU(s): $(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sort | uniq -c | tr -s ' \n' ' ')"

HF_DIST_GPU_RESULTS="$(mktemp -d)"
export HF_DIST_GPU_RESULTS
started=$SECONDS
failed=0
left() { echo $((${HF_DIST_GPU_SECONDS:-570} - SECONDS + started)); }

# The most telling first, so that a run that is cut off has said something. One process: they share the GPUs.
files=(test_delayed test_host_waits test_trainer test_ranks test_loss test_memory test_settings test_pipeline test_parity)
for file in "${files[@]}"; do
    seconds="$(left)"
    if ((seconds < 30)); then
        echo "NOT RUN: tests/gpu/$file.py (the time is over; HF_DIST_GPU_SECONDS gives it more)"
        echo "{\"what\": \"tests/gpu/$file.py\"}" >>"$HF_DIST_GPU_RESULTS/late.jsonl"
        continue
    fi
    timeout "$seconds" python -m pytest "tests/gpu/$file.py" -q -rs -p no:xdist --junit-xml "$HF_DIST_GPU_RESULTS/$file.xml" "$@"
    code=$?
    ((code == 0 || code == 5)) || failed=1
    if ((code == 124)); then
        echo "CUT OFF: tests/gpu/$file.py after $seconds s"
        echo "{\"what\": \"tests/gpu/$file.py, cut off after $seconds s\"}" >>"$HF_DIST_GPU_RESULTS/late.jsonl"
    fi
done
seconds="$(left)"
if ((seconds > 60)); then
    timeout "$seconds" python -m tests.gpu.bench_llama || failed=1
else
    echo "NOT RUN: tests/gpu/bench_llama.py (the time is over)"
    echo '{"what": "tests/gpu/bench_llama.py"}' >>"$HF_DIST_GPU_RESULTS/late.jsonl"
fi
python -m tests.gpu.results "$HF_DIST_GPU_RESULTS" "bash tests/run_gpu.sh $*" || failed=1
exit "$failed"
