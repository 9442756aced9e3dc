"""What a simulated process runs beside plain steps: the Trainer without a launcher, checkpoints in the background."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.gpu_sim.rank import GPU, simulated_gpu, simulated_rank
from tests.gpu_sim.recorder import where
from tests.gpu_sim.trace import HOST
from tests.gpu_sim.training import SMALL, STEADY, Report, Setting, model_of, report

STEPS = 3
MODEL = replace(SMALL, layers=2)


def train(rank: int, meet: str, stage: int) -> Report:
    """`python train.py` on a machine with a GPU; the last of some steps."""
    from transformers import TrainerCallback

    from hf_dist import DistTrainer, DistTrainingArguments

    class Marks(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            recorder.trace.mark("built" if state.global_step == 0 else STEADY)

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == STEPS:
                recorder.trace.mark("over")

    config = Setting(stage=stage).config()
    for key in ("train_micro_batch_size_per_gpu", "optimizer"):
        del config[key]
    with simulated_gpu() as recorder, recorder, tempfile.TemporaryDirectory() as folder:
        rows = [{"input_ids": torch.zeros(SMALL.seq, dtype=torch.long)} for _ in range(STEPS)]
        arguments = DistTrainingArguments(
            output_dir=folder, dist_config=config, per_device_train_batch_size=1, num_train_epochs=1, bf16=True,
            save_strategy="no", report_to=[], logging_steps=10 * STEPS, disable_tqdm=True,
        )  # fmt: skip

        def collate(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            ids = torch.stack([row["input_ids"] for row in batch])
            return {"input_ids": ids, "labels": ids}

        trainer = DistTrainer(
            model=model_of(Setting(), MODEL),
            args=arguments,
            train_dataset=rows,
            data_collator=collate,
            callbacks=[Marks()],
        )
        trainer.train()
        del recorder.trace.entries[recorder.trace.marks["over"] :]
        return report(recorder.trace)


def save(rank: int, meet: str, stage: int, waits: bool = True) -> Report:
    """A step, a checkpoint in the background that is read while the next steps run; `waits`: False leaves out the wait."""
    import hf_dist
    from hf_dist.checkpoint.save import CheckpointWriter

    with simulated_rank(4, rank) as (recorder, _), recorder, tempfile.TemporaryDirectory() as folder:
        config = {**Setting(stage=stage).config(), "checkpoint": {"async_save": True}}
        engine = hf_dist.initialize(model_of(Setting(), MODEL), config=config, device=GPU)
        recorder.trace.mark("built")
        started, may_write = threading.Event(), threading.Event()

        def write(self: Any, working: Path, snapshot: Any, request: Any, begun: float) -> None:
            tensors = [*(part.values for part in snapshot.parts), *snapshot.state.values()]
            found = [getattr(value, "values", value) for value in tensors]
            blocks = tuple(
                {recorder.block_of(v) for v in found if isinstance(v, torch.Tensor) and v.device.type == "cpu"}
            )
            recorder.trace.launch(HOST, "writing a checkpoint", where(), reads=blocks, writes=())
            started.set()
            may_write.wait(60)

        CheckpointWriter._write = write  # type: ignore[method-assign]
        if not waits:
            torch.cuda.current_stream().__class__.synchronize = lambda self: None  # type: ignore[method-assign]
        ids = torch.zeros(SMALL.rows, SMALL.seq, dtype=torch.long, device=GPU)
        for step in range(3):
            recorder.trace.mark(STEADY)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            if step == 0:
                engine.save_checkpoint(Path(folder, "checkpoint"))
                assert started.wait(60)
        may_write.set()
        engine.writer.join()
        return report(recorder.trace)
