"""A student that learns from a teacher's logits, in a loop of its own; the teacher beside it or in another role."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from hf_dist import DistAccelerator, remote_model
from hf_dist.errors import ModelError
from tests.parity.families import make_model

STEPS = 5
ROWS = 4
"""Of a step, over all ranks."""


def save_models(folder: str) -> None:
    """`teacher`, and `student`, which is smaller and has other weights."""
    make_model("llama", layers=3).save_pretrained(f"{folder}/teacher")
    student = make_model("llama", layers=2)
    torch.manual_seed(2)
    with torch.no_grad():
        for param in student.parameters():
            param.add_(0.05 * torch.randn_like(param))
    student.save_pretrained(f"{folder}/student")


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Rows of six tokens; every third has two of padding."""
    made = []
    for i in range(count):
        ids = torch.randint(4, 60, (6,), generator=torch.Generator().manual_seed(i))
        mask = torch.ones(6, dtype=torch.long)
        mask[4:] = int(bool(i % 3))
        made.append({"input_ids": ids * mask, "attention_mask": mask})
    return made


def with_teacher(folder: str, ranks: int, layout: dict[str, Any]) -> dict[str, Any]:
    """The section: a teacher on `ranks` ranks in that layout, the trainer on the rest."""
    teacher = {"ranks": ranks, "model": f"{folder}/teacher", "config": layout}
    return {"hf_dist": {"roles": {"trainer": {"ranks": "rest"}, "teacher": teacher}}}


def prepared(folder: str, config: dict[str, Any]) -> tuple[Any, ...] | None:
    """(accelerator, student, teacher, optimizer, loader); None on the teacher's ranks, once it has served."""
    torch.manual_seed(0)
    try:
        accelerator = DistAccelerator(dist_config={"train_micro_batch_size_per_gpu": "auto", **config})
    except SystemExit as end:
        assert not end.code, end
        return None
    load = transformers.AutoModelForCausalLM.from_pretrained
    student: Any = load(f"{folder}/student", dtype=torch.float32)
    is_remote = "hf_dist" in config
    teacher: Any = remote_model("teacher") if is_remote else load(f"{folder}/teacher", dtype=torch.float32)
    optimizer: Any = torch.optim.AdamW(student.parameters(), lr=1e-2, eps=1e-3)  # rounding decides no sign
    made: Any = rows(STEPS * ROWS)
    loader: Any = DataLoader(made, batch_size=ROWS // accelerator.num_processes)
    student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
    teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    return accelerator, student, teacher, optimizer, loader


def distil(rank: int, world: int, folder: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """Losses, norms, weights and bytes after five steps; None on the teacher's ranks."""
    ready = prepared(folder, config)
    if ready is None:
        return None
    accelerator, student, teacher, optimizer, loader = ready
    remote = "hf_dist" in config
    if remote:
        _is_told_what_does_not_come(teacher)
        _gives_log_probabilities(teacher)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for batch in loader:
        with torch.no_grad():
            expected = teacher(**batch)
        given = student(**batch).logits.log_softmax(-1)
        apart = torch.nn.functional.kl_div(given, expected.logits.log_softmax(-1), log_target=True, reduction="none")
        loss = (apart.sum(-1) * batch["attention_mask"]).sum() / given.shape[0]
        accelerator.backward(loss)
        found["norms"].append(float(accelerator.clip_grad_norm_(student.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(float(accelerator.reduce(loss.detach(), "mean")))
    state = accelerator.get_state_dict(student)
    found["weights"] = {name: t.float().clone() for name, t in state.items()} if rank == 0 else {}
    if remote:
        found["held"] = sum(p.numel() for p in teacher.parameters())
        found["sent"], found["received"] = teacher._asker.sent_nbytes, teacher._asker.received_nbytes
        teacher._asker.close()
    return found


def _gives_log_probabilities(teacher: Any) -> None:
    """Of given tokens: four bytes each come back, and they are those of the logits. Not counted in the job's bytes."""
    asker = teacher._asker
    ids = torch.arange(6).view(2, 3) + 4
    labels = torch.where(ids == 5, -100, ids)
    before = asker.received_nbytes
    found = teacher.log_probs(labels, input_ids=ids)
    assert asker.received_nbytes - before in (4 * 4, 0)  # 0: another rank of this row asks
    expected = teacher(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])
    torch.testing.assert_close(found, expected[..., 0], rtol=1e-5, atol=1e-5)
    if asker._link is not None:
        asker._link.sent_nbytes = asker._link.received_nbytes = 0


def _is_told_what_does_not_come(teacher: Any) -> None:
    """No value of a role is None, or left out, in silence."""
    ids = torch.ones(1, 2, dtype=torch.long)
    embedded = torch.zeros(1, 2, 8, requires_grad=True)
    for call in (lambda: teacher(ids, ids), lambda: teacher(inputs_embeds=embedded)):
        with pytest.raises(ModelError):
            call()
