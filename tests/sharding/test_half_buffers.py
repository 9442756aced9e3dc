"""A model in bf16 has its tables and its authors' fp32 weights in the dtypes of `from_pretrained(dtype=bfloat16)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_dist.config import DistConfig
from hf_dist.sharding.half_buffers import cast_in_forwards
from hf_dist.sharding.precision import precision_for
from tests.covering import FULL_GRID
from tests.sweep.tiny import builders

HALF = torch.bfloat16
FEW = {
    "XGLMForCausalLM": "model.embed_positions.weights",
    "MiniMaxForCausalLM": "model.layers.1.self_attn.slope_rate",
    "LlamaForCausalLM": "",
    "Inkling2ForCausalLM": "",
    "ResNetForImageClassification": "",
}
"""Class -> a table that is cast: without a checkpoint, and of one."""


def pretrained(name: str, folder: Path) -> tuple[Any, Any]:
    """(in fp32, the same in bf16), read from a folder."""
    made = getattr(transformers, name)
    try:
        candidates = list(builders(made))
    except Exception as error:
        pytest.skip(f"no default config: {error}")
    for candidate in candidates:
        try:
            model: Any = candidate()
            model.save_pretrained(folder)
            return tuple(made.from_pretrained(folder, dtype=dtype) for dtype in (torch.float32, HALF))  # type: ignore[return-value]
        except Exception:
            continue
    pytest.skip("no tiny copy")


def classes() -> list[str]:
    if not FULL_GRID:
        return [name for name in FEW if hasattr(transformers, name)]
    from tests.sweep.arguments import classes as every

    return list(dict.fromkeys(name for _, name in every() if "+" not in name and hasattr(transformers, name)))


@pytest.mark.parametrize("name", classes())
def test_dtypes_are_those_of_from_pretrained(name: str, tmp_path: Path) -> None:
    model, half = pretrained(name, tmp_path)
    precision = precision_for(DistConfig.model_validate({"bf16": {"enabled": True}}), model)
    wanted = {n for n, p in half.named_parameters() if p.dtype == HALF}
    norms = {f"{path}.{n}" for path, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
             for n in ("weight", "bias", "running_mean", "running_var")}  # fmt: skip
    found = {n for n, p in model.named_parameters() if precision.compute_dtype(n, p.dtype) == HALF}
    if name in FEW:  # others have parameters in the dtype of their own code, such as Deberta's q_bias
        assert found == wanted - norms
    before = {n: b.dtype for n, b in model.named_buffers()}
    cast = set(cast_in_forwards(model, precision))
    assert {n: b.dtype for n, b in model.named_buffers()} == before
    assert cast == {
        n for n, b in half.named_buffers() if b.dtype == HALF and before[n] == torch.float32
    } - norms or all(n.endswith("inv_freq") for n in before)
    if FEW.get(name):
        assert FEW[name] in cast


class Config:
    pass


class Counting(nn.Module):
    """Writes into a table, and makes a longer one."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = Config()
        self.register_buffer("table", torch.zeros(2))
        self.register_buffer("longer", torch.zeros(2), persistent=False)
        self.seen: list[torch.dtype] = []

    @classmethod
    def _from_config(cls, config: Any, dtype: torch.dtype) -> Counting:
        return cls(config).to(dtype)

    def forward(self, fails: bool = False) -> None:
        table: Any = self.table
        self.seen.append(table.dtype)
        table.add_(1)
        self.longer = torch.zeros(4)
        if fails:
            raise RuntimeError("in the middle")


def test_what_a_forward_writes_is_kept_in_the_dtype_that_was_loaded() -> None:
    model = Counting()
    precision = precision_for(DistConfig.model_validate({"bf16": {"enabled": True}}), model)
    assert cast_in_forwards(model, precision) == ["table", "longer"]
    model()
    with pytest.raises(RuntimeError):
        model(fails=True)
    table: Any = model.table
    assert model.seen == [HALF, HALF]
    assert (table.dtype, table.tolist()) == (torch.float32, [2.0, 2.0])
    assert len(model.longer) == 4  # type: ignore[arg-type]
