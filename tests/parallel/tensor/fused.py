"""A model whose loss multiplies by the head's weight itself, as fused kernels do; what a rank does in its test."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.nn import functional

from tests.parallel.tensor.on_ranks import batch, engine_of, llama


def fused(tied: bool) -> Any:
    """A Llama with a forward like Liger's: the head is never called, its weight is read twice."""
    model = llama(tie_word_embeddings=tied)
    plain = model.forward

    def forward(self: Any, input_ids: torch.Tensor, labels: Any = None, **kwargs: Any) -> Any:
        if labels is None:
            return plain(input_ids=input_ids, **kwargs)
        hidden = self.model(input_ids=input_ids).last_hidden_state[:, :-1].to(self.lm_head.weight.device)
        logits = functional.linear(hidden, self.lm_head.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    model.forward = types.MethodType(forward, model)
    return model


def run(rank: int, world: int, stage: int) -> list[dict[str, Any]]:
    """Losses and first gradients, tied and not; what is read outside of a forward; the model's own loss after a step."""
    import hf_dist
    from hf_dist.dist import comm_counter

    found = []
    for tied in (False, True):
        model = fused(tied)
        engine = engine_of(model, world, zero_optimization={"stage": stage})
        outside = tuple(model.lm_head.weight.shape)
        with comm_counter.record() as log:
            loss = engine(**batch())
            engine.backward(loss)
        gathers = [e.nbytes for e in log.entries if e.op == "all_gather" and e.axis == "tp"]
        gradients = {name: hf_dist.full_gradient(p).clone() for name, p in model.named_parameters()}
        engine.step()
        losses = [loss.item()]
        for _ in range(2):  # the head of a later forward is the one that the step has left
            losses.append(float(engine.train_batch(iter([batch()]), lambda model, given: model(**given))))
        with torch.no_grad():
            logits = model(input_ids=batch()["input_ids"]).logits + 0
        found.append(
            {
                "losses": losses, "gradients": gradients, "outside": outside, "gathers": gathers,
                "logits": logits, "class": type(model.lm_head).__name__, "is": isinstance(model.lm_head, torch.nn.Linear),
            }
        )  # fmt: skip
    return found
