"""How much of a teacher's forward runs beside the student's step: `python -m tests.remote.bench_overlap`.

Both sleep in place of computing, as a GPU would for a host: two cores cannot run four ranks at once.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch
import transformers

from hf_dist import DistAccelerator, remote_model
from tests.harness import run_ranks
from tests.remote.jobs import rows, save_models, with_teacher

TEACHER, STUDENT, STEPS = 0.3, 0.1, 12
"""Seconds of a forward of the teacher and of a step of the student."""


def timed(rank: int, world: int, folder: str, config: dict[str, Any], asks: bool) -> float | None:
    """Median seconds of a step; None on the ranks of the teacher."""
    from transformers.models.llama.modeling_llama import LlamaModel

    forward = LlamaModel.forward

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(TEACHER)
        return forward(self, *args, **kwargs)

    LlamaModel.forward = slow  # type: ignore[method-assign]
    try:
        accelerator = DistAccelerator(dist_config={"train_micro_batch_size_per_gpu": "auto", **config})
    except SystemExit:
        return None
    LlamaModel.forward = forward  # type: ignore[method-assign]
    teacher = remote_model("teacher")
    student: Any = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/student", dtype=torch.float32)
    optimizer: Any = torch.optim.AdamW(student.parameters())
    student, optimizer = accelerator.prepare(student, optimizer)
    batch = {name: torch.stack([row[name] for row in rows(2)]) for name in ("input_ids", "attention_mask")}
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        answer = teacher(**batch) if asks else None
        given = student(**batch).logits
        time.sleep(STUDENT)
        expected = answer.logits if answer is not None else torch.zeros_like(given)
        accelerator.backward((given - expected).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    teacher._asker.close()
    return statistics.median(seconds)


def main() -> None:
    """Print seconds of a step with and without the teacher."""
    folder = tempfile.mkdtemp()
    save_models(folder)
    layout = {"zero_optimization": {"stage": 3}}
    config = {**layout, **with_teacher(folder, 2, layout)}
    for asks in (True, False):
        found = run_ranks(timed, 4, (folder, config, asks))
        print(
            f"asks the teacher: {asks}; step {found[0]:.3f} s; teacher alone {TEACHER} s, student alone {STUDENT} s + its own"
        )


if __name__ == "__main__":
    main()
