"""`DistTrainer` in Ray Train's workers: a worker that is killed, a group of another size, reported checkpoints.

Skipped where Ray is not installed, as in tests/run.sh: `pip install "ray[train]"`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from tests import forked
from tests.harness import ROOT

ray: Any = pytest.importorskip("ray", reason="248 MB, and a minute for each job: not in the test extra")
EXAMPLES = str(Path(ROOT, "examples"))
CONFIG = {"zero_optimization": {"stage": 3}, "checkpoint": {"async_save": True}}


def arguments(rows: int, steps: int) -> dict[str, Any]:
    """Eight rows a step."""
    return {
        "dist_config": CONFIG, "per_device_train_batch_size": rows, "max_steps": steps, "save_steps": 2, "logging_steps": 1,
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
    }  # fmt: skip


ALONE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import ray_train
from tests.ecosystem.ray_jobs import Killed
ray_train.RayReportCallback = lambda: Killed(sys.argv[2], -1)
ray_train.train_loop({"arguments": json.loads(sys.argv[3])})
"""


def losses(folder: Path) -> dict[int, tuple[float, int]]:
    """Step -> (loss, workers); what was done again after a kill counts once, the last time."""
    lines = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["world"]) for line in lines}


@pytest.mark.timeout(900)
def test_a_killed_worker_and_a_smaller_group_go_on_as_one_process_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alone").mkdir()
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    asked = json.dumps({"output_dir": str(tmp_path / "alone" / "out"), **arguments(8, 6)})
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
    done = forked.run([sys.executable, str(script), EXAMPLES, str(tmp_path / "alone"), asked], env=env)
    assert done.returncode == 0, done.stdout
    monkeypatch.syspath_prepend(EXAMPLES)
    import ray_train

    from tests.ecosystem.ray_jobs import Killed

    found = os.pathsep.join([ROOT, EXAMPLES, os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": found, "OMP_NUM_THREADS": "1", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
    try:
        first = ray_train.fit(tmp_path, 2, False, arguments(4, 4), [Killed(str(tmp_path), 3)])
        second = ray_train.fit(tmp_path, 1, False, arguments(8, 6), [Killed(str(tmp_path), 3)])
    finally:
        ray.shutdown()
    assert (tmp_path / "killed").exists()
    mine, reference = losses(tmp_path), losses(tmp_path / "alone")
    assert sorted(mine) == [1, 2, 3, 4, 5, 6]
    assert [world for _, world in mine.values()] == [2, 2, 2, 2, 1, 1]
    for step, (loss, _) in reference.items():
        assert mine[step][0] == pytest.approx(loss, rel=1e-5), step
    for result, step in ((first, 4), (second, 6)):
        assert result.error is None and result.metrics["step"] == step
        assert result.checkpoint.path.endswith(f"checkpoint-{step}")
    reported = tf.AutoModelForCausalLM.from_pretrained(second.checkpoint.path).state_dict()
    final = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final").state_dict()
    assert [name for name, value in final.items() if not torch.equal(value, reported[name])] == []
