"""No config of transformers makes the readers of its fields raise: those that differ from layer to layer, and two texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_dist.hf.callbacks.flops import TrainingFlops
from hf_dist.hf.callbacks.tokens import TokenCounter
from hf_dist.model_config import field, text_config, values
from hf_dist.parallel.sequence.split import heads_of
from tests.covering import FULL_GRID

FEW = [name for name in ("gemma4", "dots3_note", "musicgen", "llama") if name in CONFIG_MAPPING]
NAMES = ("head_dim", "num_attention_heads", "num_key_value_heads", "num_local_experts", "sliding_window", "vocab_size")


@pytest.mark.parametrize("name", list(CONFIG_MAPPING) if FULL_GRID else FEW)
def test_every_field_can_be_read(name: str) -> None:
    try:
        config: Any = AutoConfig.for_model(name)
    except Exception as error:
        pytest.skip(f"no default config: {error}")
    text = text_config(config)
    for field_name in NAMES:
        found = values(text, field_name)
        assert field(text, field_name, "none") == (found[0] if found else "none")
    model: Any = SimpleNamespace(config=config, named_modules=list)
    TokenCounter(config)
    TrainingFlops.of(model)
    assert heads_of(model) >= 1


def test_attention_of_layers_that_differ_is_counted_layer_by_layer() -> None:
    class Ambiguous(SimpleNamespace):
        def __getattribute__(self, name: str) -> Any:
            if name == "head_dim":
                raise RuntimeError("a per-layer attribute")
            return super().__getattribute__(name)

    layers = [SimpleNamespace(head_dim=size) for size in (4, 4, 16)]
    config = Ambiguous(num_hidden_layers=3, num_attention_heads=2, hidden_size=99, per_layer_config=layers)
    model: Any = SimpleNamespace(config=config, named_modules=list)
    found = TrainingFlops.of(model)
    assert found is not None
    assert found.per_pair == 12 * 2 * (4 + 4 + 16)
