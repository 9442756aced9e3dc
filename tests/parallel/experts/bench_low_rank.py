"""LoRA on stacked experts in one process, PEFT's merged stack and low rank in turn: python -m
tests.parallel.experts.bench_low_rank"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from hf_dist.parallel.experts.low_rank import keep_adapters_low_rank
from tests.parallel.experts.bench_spread import VOCAB
from tests.parallel.experts.spread_jobs import adapted
from tests.parallel.experts.test_low_rank import kept_nbytes


def build(experts: int, width: int, rank: int) -> Any:
    """Two layers, four experts chosen."""
    import transformers as tf

    torch.manual_seed(0)
    config = tf.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=width, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=width // 4, intermediate_size=width, moe_intermediate_size=width, num_experts=experts,
        num_experts_per_tok=4, decoder_sparse_step=1, use_cache=False, experts_implementation="grouped_mm",
    )  # fmt: skip
    return adapted(tf.Qwen3MoeForCausalLM(config).train(), rank)


def main() -> None:
    """A table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.randint(0, VOCAB, (2, 128), generator=torch.Generator().manual_seed(0))
    models = [build(asked.experts, asked.width, asked.rank) for _ in range(2)]
    keep_adapters_low_rank(models[1])
    kept = [kept_nbytes(model, {"input_ids": ids}) for model in models]
    losses: list[float] = []
    seconds: list[list[float]] = [[], []]
    for turn in range(asked.rounds + 1):
        for index, model in enumerate(models):
            model.zero_grad()
            start = time.perf_counter()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            if turn:
                seconds[index].append(time.perf_counter() - start)
            losses.append(float(loss))
    ratios = sorted(b / a for a, b in zip(*seconds, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"loss {losses[0]:.6f} {losses[1]:.6f}")
    print(f"kept for backward MB {kept[0] / 1e6:.1f} {kept[1] / 1e6:.1f}, ratio {kept[1] / kept[0]:.2f}")
    print(
        f"forward and backward, low rank / PEFT {middle:.2f} ({low:.2f}, {high:.2f}); {statistics.median(seconds[0]):.2f} s"
    )


if __name__ == "__main__":
    main()
