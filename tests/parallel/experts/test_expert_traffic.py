"""What experts cost on the wire: the formula by hand, the crossover, and which `ep` is advised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from hf_dist.config import load_config
from hf_dist.planning.expert_traffic import advice, choices, crossover

WIDTH, INNER, EXPERTS, CHOSEN, LAYERS = 64, 32, 16, 4, 2
P = 3 * WIDTH * INNER * EXPERTS * LAYERS
"""Elements of all experts."""


def model() -> Any:
    """A mixture without memory."""
    with torch.device("meta"):
        return tf.Qwen3MoeForCausalLM(
            tf.Qwen3MoeConfig(
                vocab_size=64, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4,
                head_dim=16, intermediate_size=WIDTH, moe_intermediate_size=INNER, num_experts=EXPERTS,
                num_experts_per_tok=CHOSEN, decoder_sparse_step=1,
            )
        )  # fmt: skip


def config(stage: int, **more: Any) -> Any:
    """bf16 weights, gradients on the wire in fp32."""
    sections = {"bf16": {"enabled": True}, "communication_data_type": "fp32", "gradient_accumulation_steps": 1}
    return load_config({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **sections, **more})


def test_rows_are_the_formula() -> None:
    rows = choices(model(), config(3), shard=8, here=4, tokens=1000)
    assert [row.ep for row in rows] == [1, 2, 4]
    for row in rows:
        edp = 8 / row.ep
        assert row.weights == pytest.approx(P / row.ep * (edp - 1) / edp * (2 * 2 + 4), abs=1)
        visits = row.ep * (1 - (1 - 1 / row.ep) ** CHOSEN)
        assert row.tokens == pytest.approx(4 * 1000 * LAYERS * visits * WIDTH * 2 * (row.ep - 1) / row.ep, abs=1)
    again = choices(model(), config(3), shard=8, here=4, tokens=1000, recomputed=True)
    assert again[1].tokens == pytest.approx(1.5 * rows[1].tokens, abs=2)


def test_both_send_the_same_at_the_crossover() -> None:
    rows = choices(model(), config(3), shard=4, here=4, tokens=1000)
    tokens = crossover(rows[0], rows[2], 1000)
    at = choices(model(), config(3), shard=4, here=4, tokens=round(tokens))
    assert at[0].nbytes == pytest.approx(at[2].nbytes, rel=1e-2)


def test_few_tokens_go_to_experts_and_many_have_them_come() -> None:
    few, many = (choices(model(), config(3), shard=4, here=4, tokens=n) for n in (10, 10**7))
    assert 'take "expert_parallel": {"enabled": true, "autoep_size": 4}' in advice(few, 1, 10)
    assert advice(many, 4, 10**7)[-1] == "leave expert_parallel out: gathering sends less"
    assert any("(in use)" in line for line in advice(few, 4, 10)) and not advice(few, 4, 10)[-1].startswith("take")


def test_a_model_without_experts_gets_no_lines() -> None:
    with torch.device("meta"):
        llama = tf.LlamaForCausalLM(tf.LlamaConfig(num_hidden_layers=1))
    assert choices(llama, config(3), shard=4, here=4, tokens=10) == []
    assert advice([], 1, 10) == []


def test_plan_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hf_dist.tools.cli.plan import plan

    model().config.save_pretrained(tmp_path)
    source = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**source, "architectures": ["Qwen3MoeForCausalLM"]}))
    file = tmp_path / "zero3.json"
    spread = {"enabled": True, "autoep_size": "auto"}
    file.write_text(
        json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "expert_parallel": spread})
    )
    plan(model=str(tmp_path), config=file, world_size=8, seq="128")
    said = capsys.readouterr().out
    assert "bytes that a rank sends for experts in a microbatch of 128 tokens" in said
    assert "ep 8" in said and "(in use)" in said
