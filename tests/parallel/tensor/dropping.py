"""What a rank does in the tests of dropout over split matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.parallel.tensor.on_ranks import batch, engine_of, llama

HALF = 0.5
STEPS = 2


def gpt2() -> Any:
    """Dropout of embeddings, of attention, and behind both products of rows, inside of attention and MLP."""
    small = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=101, n_positions=32, attn_implementation="eager")
    return tf.GPT2LMHeadModel(tf.GPT2Config(**small, embd_pdrop=HALF, resid_pdrop=HALF, attn_pdrop=HALF))


def neox() -> Any:
    """Dropout of attention, and between regions."""
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=101)
    config = tf.GPTNeoXConfig(**small, hidden_dropout=HALF, attention_dropout=HALF)
    config._attn_implementation = "eager"
    return tf.GPTNeoXForCausalLM(config)


def lora() -> Any:
    """Dropout of what adapters of columns and of rows read."""
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "o_proj", "up_proj", "down_proj"]
    return get_peft_model(llama(), LoraConfig(r=2, lora_dropout=HALF, target_modules=names, init_lora_weights=False))


MODELS = {"gpt2": gpt2, "neox": neox, "lora": lora}


def dropped(rank: int, world: int, cases: list[tuple[str, bool]]) -> list[dict[str, Any]]:
    """For every (model, regions): what each dropout of the first forward kept; then losses and weights of some steps, without
    and with blocks that are computed again."""
    found = []
    for name, regions in cases:
        record: dict[str, Any] = {}
        for again in (False, True):
            torch.manual_seed(0)
            model = MODELS[name]().train()
            if again:
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model.enable_input_require_grads()
            engine = engine_of(model, world, hf_dist={"sequence_regions": regions})
            torch.manual_seed(7)
            kept = _recorded(lambda engine=engine: engine(**batch())) if not again else []
            torch.manual_seed(8)
            losses = [float(engine.train_batch(iter([batch()]))) for _ in range(STEPS)]
            whole = {n: p.detach().clone() for n, p in model.named_parameters() if "norm" in n or "ln_" in n}
            record["again" if again else "plain"] = (losses, whole, float(torch.rand(())))
            record.setdefault("kept", kept)
        found.append(record)
    return found


def _recorded(forward: Any) -> list[torch.Tensor]:
    """Which elements every dropout of a forward has kept."""
    kept: list[torch.Tensor] = []
    plain = torch.nn.functional.dropout

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        ones = torch.ones_like(x)
        if training and p > 0:
            mask = plain(ones, p, True)
            kept.append(mask > 0)
            return x * mask
        return x

    torch.nn.functional.dropout = dropout
    try:
        forward()
    finally:
        torch.nn.functional.dropout = plain
    return kept


def resumed(rank: int, world: int, folder: str) -> float:
    """The next random number after a resume on ranks that read the same rows, of a job in which they read others."""
    alone = engine_of(gpt2(), 1)
    torch.manual_seed(rank)
    alone.train_batch(iter([batch()]))
    alone.save_checkpoint(Path(folder))
    together = engine_of(gpt2(), world)
    together.load_checkpoint(Path(folder))
    return float(torch.rand(()))


def seeded_apart(rank: int, world: int) -> None:
    """Ranks of one split that draw other numbers."""
    torch.manual_seed(0)
    engine = engine_of(gpt2().train(), world)
    torch.manual_seed(rank)
    engine.train_batch(iter([batch()]))
