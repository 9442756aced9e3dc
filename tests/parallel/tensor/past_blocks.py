"""A model whose own code adds a residual past a block, over stages and slices: what arrives is written in place."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast

LENGTHS, WINDOW = (7, 9), 2


class PastModel(LlamaModel):
    """Adds residuals past its inner blocks, where the input and the output of a block are parts of the sequence."""

    again = False
    """Whether its code has torch run the blocks again in backward."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        """Without padding or caches."""
        x = self.embed_tokens(input_ids)
        places = torch.arange(x.shape[1], device=x.device)[None]
        turned = self.rotary_emb(x, places)
        for i, block in enumerate(self.layers):
            run = functools.partial(checkpoint, block, use_reentrant=False) if self.again else block
            out = run(x, attention_mask=None, position_ids=places, position_embeddings=turned)
            x = x + out if 0 < i < len(self.layers) - 1 else out
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class PastForCausalLM(LlamaForCausalLM):
    """The same with a head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = PastModel(config)
        self.post_init()


def make(again: bool = False) -> Any:
    """Four blocks."""
    torch.manual_seed(0)
    small = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=101)
    model = PastForCausalLM(LlamaConfig(intermediate_size=48, use_cache=False, **small))
    model.model.again = again
    return model.train()


def window() -> list[dict[str, torch.Tensor]]:
    """Microbatches of two lengths that no two ranks divide."""
    made = (torch.arange(2 * n).view(2, n) * 7 % 100 + 1 for n in LENGTHS)
    return [{"input_ids": ids, "labels": ids} for ids in made]


def losses(rank: int, world: int) -> dict[str, Any]:
    """With each value of the key: the losses of some steps, or the error."""
    import hf_dist
    from hf_dist.errors import ModelError

    found: dict[str, Any] = {}
    for regions in (True, "auto"):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": WINDOW,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "tensor_parallel": {"autotp_size": 2},
            "pipeline": {"stages": 2},
            "hf_dist": {"sequence_regions": regions},
        }
        try:
            engine = hf_dist.initialize(make(), config=config, example_batch=window()[0], device="cpu")
        except ModelError as error:
            found[str(regions)] = str(error)
            continue
        found[str(regions)] = [float(engine.train_batch(iter(window()))) for _ in range(3)]
    return found


def expected() -> list[float]:
    """The same in one process."""
    model, found = make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = sum(model(**batch).loss for batch in window()) / WINDOW
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found
