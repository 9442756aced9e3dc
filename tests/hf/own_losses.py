"""Models of users that are their own reference for nothing: random numbers, sums, in-batch negatives, batch statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput


class Own(LlamaForCausalLM):
    """A causal model with a loss of its own."""

    def forward(self, input_ids: Any = None, labels: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        hidden = self.changed(hidden)
        logits = self.lm_head(hidden)
        return CausalLMOutput(loss=self.loss_of(hidden, logits, labels), logits=logits)

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def loss_of(
        self, hidden: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, how: str = "mean"
    ) -> torch.Tensor:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=how)


class Random(Own):
    """Hard-wired dropout."""

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.dropout(hidden, 0.1, training=True)


class Centred(Own):
    """Statistics of the batch."""

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - hidden.mean(dim=(0, 1), keepdim=True)


class Padded(Own):
    """Sees later tokens only if some row of the batch is padded, as PaliGemma without `token_type_ids`."""

    def forward(self, input_ids: Any = None, labels: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        self.shifts = not attention_mask.all()
        return super().forward(input_ids, labels, attention_mask)

    def changed(self, hidden: torch.Tensor) -> torch.Tensor:
        return 20 * hidden.roll(-1, dims=1) if self.shifts else hidden


class Summed(Own):
    """A sum over tokens."""

    def loss_of(
        self, hidden: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, how: str = "sum"
    ) -> torch.Tensor:
        return super().loss_of(hidden, logits, labels, how)


class Negatives(Own):
    """Each row against the others."""

    def loss_of(self, hidden: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, how: str = "") -> torch.Tensor:
        return functional.cross_entropy(hidden[:, 0] @ hidden[:, -1].T, torch.arange(len(hidden)))
