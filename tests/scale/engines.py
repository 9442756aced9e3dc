"""The same Llama under this engine and under torch's FSDP2, as one steps them in a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_dist.memory.loss.chunks import Cast, Computed


@dataclass(frozen=True)
class Case:
    """A model, and what one rank computes."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    rows: int = 1
    seq: int = 4096
    checkpointing: bool = True

    def shrunk(self) -> Case:
        """The same modules, so small that computing takes no time."""
        return replace(self, width=64, inner=224, heads=4, kv_heads=1, vocabulary=1024, seq=8)

    def llama(self) -> Any:
        """A stock HF model in fp32, in train mode."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.width, num_hidden_layers=self.layers, use_cache=False,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, intermediate_size=self.inner,
            tie_word_embeddings=False,
        )  # fmt: skip
        model = LlamaForCausalLM(config).train()
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def batch(self) -> dict[str, torch.Tensor]:
        """Tokens that are their own labels."""
        ids = torch.zeros(self.rows, self.seq, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}


LLAMA_3 = {
    "8b": Case(4096, 14336, 32, 32, 8, 128256),
    "70b": Case(8192, 28672, 80, 64, 8, 128256),
    "405b": Case(16384, 53248, 126, 128, 8, 128256),
}
OPTIMIZER = {"lr": 1e-4, "weight_decay": 0.1}
CLIPPING = 1.0
Step = Callable[[], None]


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    """bf16 with fp32 masters and fp32 gradients on the wire, fused AdamW, clipping."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {**OPTIMIZER, "fused": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "gradient_clipping": CLIPPING,
        "hf_dist": {"stall_report_seconds": 0},
        **more,
    }


def make_ours(model: Any, config: dict[str, Any]) -> tuple[Any, Callable[[dict[str, torch.Tensor]], None]]:
    """(engine, a function that makes one microbatch and steps at the end of a window)."""
    import hf_dist

    engine = hf_dist.initialize(model, config=config, device="cpu")
    chunked = config["hf_dist"].get("tiled_loss") is None

    def micro_step(batch: dict[str, torch.Tensor]) -> None:
        fake = isinstance(batch["input_ids"], FakeTensor)
        engine.backward(chunked_loss(engine, **batch) if fake and chunked else engine(**batch).loss)
        engine.step()

    return engine, micro_step


def chunked_loss(model: Any, input_ids: torch.Tensor, labels: torch.Tensor, split: Any = None) -> torch.Tensor:
    """What HF's loss becomes with real tensors: fake ones cannot be marked on their way into the head.

    `split`: the logits are some columns of a vocabulary that ranks share.
    """
    logits = model(input_ids=input_ids).logits
    rows = Computed(logits, (Cast(torch.float32),), split).rows(lambda t: t.flatten(0, 1))
    shifted = nn.functional.pad(labels[:, : logits.shape[1]], (0, 1), value=-100)[..., 1:]
    return rows.cross_entropy(shifted.flatten(), ignore_index=-100, mean=True)


def make_fsdp2(model: Any, mesh: Any, ends: bool = False) -> tuple[Any, Callable[[dict[str, torch.Tensor]], None]]:
    """(model, a function that steps). A unit for every layer and the rest; `ends`: embedding and head are units, too,
    and the head stays from forward to backward, as torchtitan has it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if ends:
        fully_shard(model.model.embed_tokens, **options)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if ends:
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)

    def step(batch: dict[str, torch.Tensor]) -> None:
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def make_plain(model: nn.Module) -> tuple[Any, Callable[[dict[str, torch.Tensor]], None]]:
    """(model, a function that steps): torch alone, what every engine has to pay as well."""
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)

    def step(batch: dict[str, torch.Tensor]) -> None:
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()

    return model, step
