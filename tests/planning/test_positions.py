"""How many positions a model has: known only where a table sets a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_dist.errors import ConfigError
from hf_dist.planning.positions import positions_of
from hf_dist.tools.cli import app
from hf_dist.tools.cli.planned import row_tokens

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 64}
DECODER = {"d_model": 32, "decoder_layers": 1, "encoder_layers": 1, "vocab_size": 64, "max_position_embeddings": 48}
HEADS = {"decoder_attention_heads": 2, "encoder_attention_heads": 2, "decoder_ffn_dim": 32, "encoder_ffn_dim": 32}
FAMILIES: list[tuple[str, str, dict[str, Any], int | None]] = [
    (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_positions": 48, "n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 64},
        48,
    ),
    ("BertConfig", "BertForMaskedLM", {**SMALL, "max_position_embeddings": 48}, 48),
    ("RobertaConfig", "RobertaForMaskedLM", {**SMALL, "max_position_embeddings": 50}, 48),
    (
        "OPTConfig",
        "OPTForCausalLM",
        {**SMALL, "ffn_dim": 32, "max_position_embeddings": 48, "word_embed_proj_dim": 32},
        48,
    ),
    ("BartConfig", "BartForConditionalGeneration", {**DECODER, **HEADS}, 48),
    ("LlamaConfig", "LlamaForCausalLM", {**SMALL, "max_position_embeddings": 48, "num_key_value_heads": 2}, None),
    ("LlamaConfig", "LlamaForCausalLM", {**SMALL, "max_position_embeddings": 64}, None),
    (
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {**SMALL, "max_position_embeddings": 48, "relative_attention": True, "position_buckets": 24}
        | {"position_biased_input": False, "pos_att_type": ["p2c", "c2p"]},
        None,
    ),
]


@pytest.mark.parametrize(("config", "model", "sizes", "positions"), FAMILIES)
def test_a_table_that_every_token_is_looked_up_in_is_the_limit(
    config: str, model: str, sizes: dict[str, Any], positions: int | None
) -> None:
    """A real model agrees: it takes as many tokens and no more, or more than its config says."""
    real = getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()
    assert positions_of(real) == positions
    ids = torch.full((1, (positions or 60) + 1), 5)
    real(ids[:, :-1])
    if positions is None:
        assert row_tokens(real, 4096) == 4096
        return
    with pytest.raises((IndexError, RuntimeError)):
        real(ids)
    assert row_tokens(real, None) == positions
    with pytest.raises(ConfigError, match=f"--seq: 49 tokens are more than the {positions} positions of the model"):
        row_tokens(real, 49)


def test_a_plan_is_made_for_rows_that_the_model_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.BertConfig(**{**SMALL, "max_position_embeddings": 48}, architectures=["BertForMaskedLM"])
    config.save_pretrained(tmp_path)
    (tmp_path / "ds.json").write_text("{}")
    words = ["plan", "--model", str(tmp_path), "--config", str(tmp_path / "ds.json"), "--device-memory", "80GB"]
    app(words, standalone_mode=False)
    out = capsys.readouterr().out
    assert "microbatches of 1 x 48 tokens" in out and "longest rows that fit: 48 tokens" in out, out
    assert "does not run on meta" not in out
    with pytest.raises(ConfigError, match="--seq: 2048 tokens are more than the 48 positions"):
        app([*words, "--seq", "2048"], standalone_mode=False)
