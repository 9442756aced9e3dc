"""How often ranks ask each other whether one was told to stop; what an interrupted training says."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_dist import DistTrainer, DistTrainingArguments
from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.hf import stop_signal
from hf_dist.hf.stop_signal import StopSignal
from tests.hf.recipes import make_model, pad, plain_arguments, texts


class Ring:
    """Takes the place of the all-reduce; `others` is what the other ranks bring. The clock is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.now, self.others = 0, 0.0, torch.zeros(2)
        monkeypatch.setattr(collectives, "all_reduce", self.all_reduce)
        monkeypatch.setattr(stop_signal.time, "monotonic", lambda: self.now)

    def all_reduce(self, axis: MeshAxis, tensor: torch.Tensor, op: str) -> Any:
        self.asked += 1
        torch.maximum(tensor, self.others, out=tensor)
        return collectives.Handle([])


def calls(stop: StopSignal, ring: Ring, count: int, seconds: float = 0.1) -> list[int]:
    """The answers of as many microbatches."""
    answers = []
    for _ in range(count):
        ring.now += seconds
        answers.append(stop.agreed())
    return answers


@pytest.mark.parametrize("world", [2, 64])
def test_few_ranks_ask_for_every_microbatch(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(monkeypatch)
    stop = StopSignal(MeshAxis("control", world, 0, None))
    assert calls(stop, ring, 10) == [0] * 10
    assert ring.asked == 10


def test_thousands_of_ranks_rest_between_two_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(monkeypatch)
    stop = StopSignal(MeshAxis("control", 4096, 0, None))
    assert not any(calls(stop, ring, 400))  # 40 seconds
    assert 15 < ring.asked < 25, "every two seconds"
    stop._note(signal.SIGTERM, None)
    answers = calls(stop, ring, 60)
    assert signal.SIGTERM in answers and answers.index(signal.SIGTERM) < 50, "heard of within five seconds"


def test_the_other_ranks_rest_as_long_as_rank_0_says(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(monkeypatch)
    ring.others = torch.tensor([0.0, 3.0])
    stop = StopSignal(MeshAxis("control", 4096, 7, None))
    calls(stop, ring, 1 + 1 + 3 + 1 + 3 + 1)
    assert ring.asked == 4


@pytest.mark.parametrize(
    ("save_steps", "resumes", "says"),
    [
        (
            2,
            "",
            'the newest checkpoint is {out}/checkpoint-2; with resume_from_checkpoint="{out}/checkpoint-2" the run',
        ),
        (9, "", "no checkpoint was saved; a new start begins at step 0. SIGTERM, unlike Ctrl-C, saves before the end."),
        (9, "of another run", 'no checkpoint was saved; with resume_from_checkpoint="{other}" the run continues'),
    ],
)
@pytest.mark.parametrize("beside", [False, True])
def test_an_interrupt_carries_what_is_saved_and_how_to_go_on(
    save_steps: int, resumes: str, says: str, beside: bool, tmp_path: Path
) -> None:
    def train(name: str, save_steps: int, resume: str | None = None) -> None:
        class Interrupt(TrainerCallback):
            """Ctrl-C."""

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                """In the third step."""
                if state.global_step == 3:
                    raise KeyboardInterrupt

        config = {"zero_optimization": {"stage": 3}, "checkpoint": {"async_save": beside}}
        saved = dict(save_strategy="steps", save_steps=save_steps, max_steps=4, dist_config=config)
        arguments = DistTrainingArguments(**plain_arguments(tmp_path / name, 1, **saved))
        DistTrainer(make_model(), arguments, train_dataset=texts(), data_collator=pad, callbacks=[Interrupt()]).train(
            resume
        )

    other = ""
    if resumes:
        with pytest.raises(KeyboardInterrupt):
            train("other", 1)
        other = str(tmp_path / "other" / "checkpoint-2")
    with pytest.raises(KeyboardInterrupt) as caught:
        train("out", save_steps, other or None)
    (note,) = caught.value.__notes__  # type: ignore[attr-defined]
    assert note.startswith("hf_dist: interrupted after step 3; " + says.format(out=tmp_path / "out", other=other)), note
