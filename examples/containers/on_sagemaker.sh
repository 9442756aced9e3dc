#!/usr/bin/env bash
# Starts torchrun on each machine of a SageMaker job: bash on_sagemaker.sh train.py --dist_config configs/zero3.json
# SM_HOSTS is a JSON list of the machines, SM_CURRENT_HOST this one's name, SM_NUM_GPUS its GPUs. Ranks follow the list.
set -euo pipefail
read -r machines rank first < <(python3 - <<'PY'
import json
import os

hosts = sorted(json.loads(os.environ["SM_HOSTS"]))
print(len(hosts), hosts.index(os.environ["SM_CURRENT_HOST"]), hosts[0])
PY
)
exec torchrun --nnodes "$machines" --node_rank "$rank" --nproc_per_node "${SM_NUM_GPUS:?}" \
    --master_addr "$first" --master_port 29500 "$@"
