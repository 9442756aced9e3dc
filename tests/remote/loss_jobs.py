"""A student that learns from a teacher by `remote_loss`, and by plain logits in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dist import remote_loss
from hf_dist.errors import ModelError
from hf_dist.memory.loss import divergence
from tests.remote.jobs import ROWS, prepared

LONG = 6 * ROWS
"""Tokens of a step, over all ranks."""


class _Widest(TorchDispatchMode):
    """The most rows of a tensor over the vocabulary, or a slice of one."""

    def __init__(self, widths: set[int]) -> None:
        super().__init__()
        self.widths, self.rows = widths, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            isinstance(out, torch.Tensor)
            and out.dim() > 1
            and out.shape[-1] in self.widths
            and "aten.t" not in str(func)
        ):
            held = out.untyped_storage().nbytes() // out.element_size()  # an unread tensor has a shape and no memory
            self.rows = max(self.rows, min(held, out.numel()) // out.shape[-1])
        return out


def plain(kind: float, temperature: float, student: Any, teacher: Any, labels: torch.Tensor) -> torch.Tensor:
    """TRL's loss of full logits, summed, per counted token."""
    from trl.experimental.gkd import GKDTrainer

    given = GKDTrainer.generalized_jsd_loss(
        student[:, :-1].float(),
        teacher[:, :-1].float(),
        labels[:, 1:],
        beta=kind,
        temperature=temperature,
        reduction="sum",
    )
    return given / (labels[:, 1:] != -100).sum()


def distil(
    rank: int, world: int, folder: str, config: dict[str, Any], kind: float, temperature: float
) -> dict[str, Any] | None:
    """Losses, norms, weights and bytes after five steps; None on the teacher's ranks."""
    ready = prepared(folder, config)
    if ready is None:
        return None
    accelerator, student, teacher, optimizer, loader = ready
    remote, vocabulary = "hf_dist" in config, student.config.vocab_size
    student.train()
    distance = remote_loss(kind, temperature=temperature)
    if remote:
        divergence.tile_rows = lambda vocabulary: 4  # type: ignore[attr-defined]
    found: dict[str, Any] = {"losses": [], "norms": [], "widest": 0}
    for batch in loader:
        labels = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
        if remote:
            with _Widest({vocabulary, vocabulary // 2}) as seen:
                # Ranks have different numbers of tokens: the mean is over those of all.
                count = accelerator.reduce((labels[:, 1:] != -100).sum().float(), "mean")
                loss = distance(student, teacher, batch, count=count)
                accelerator.backward(loss)
            found["widest"] = max(found["widest"], seen.rows)
        else:
            with torch.no_grad():
                expected = teacher(**batch).logits
            loss = plain(kind, temperature, student(**batch).logits, expected, labels)
            accelerator.backward(loss)
        found["norms"].append(float(accelerator.clip_grad_norm_(student.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(float(accelerator.reduce(loss.detach(), "mean")))
    state = accelerator.get_state_dict(student)
    found["weights"] = {name: t.float().clone() for name, t in state.items()} if rank == 0 else {}
    if remote:
        found["received"] = teacher._asker.received_nbytes
        _is_told_of_another_vocabulary(distance, student, teacher, batch)
        teacher._asker.close()
    return found


def _is_told_of_another_vocabulary(distance: Any, student: Any, teacher: Any, batch: Any) -> None:
    head = teacher.get_output_embeddings()
    head.__dict__["_found"] = {"weight": head.weight[:-1]}
    with pytest.raises(ModelError, match="vocabulary of"):
        distance(student, teacher, batch)
