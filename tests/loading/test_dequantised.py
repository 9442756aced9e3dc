"""Checkpoints in FP8 (DeepSeek-V3) and MXFP4 (gpt-oss) stream: stock numbers bit for bit, of which a rank reads its part."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import hf_dist
from hf_dist.checkpoint.safetensors_source import bytes_read
from hf_dist.sharding.lazy import lazy_source, lazy_sources
from hf_dist.sharding.param_slice import keep_slice
from hf_dist.tensors.tensor_slice import TensorSlice

SMALL: dict[str, Any] = dict(
    vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, use_cache=False
)
BLOCK = 8
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp8_folder(folder: Path) -> Path:
    """A DeepSeek-V3 whose matrices are float8 with a scale for each block of 8 x 8."""
    torch.manual_seed(0)
    config = tf.DeepseekV3Config(
        **SMALL, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        n_shared_experts=1, moe_intermediate_size=24,
    )  # fmt: skip
    tf.DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if not name.endswith("proj.weight") or value.dim() != 2:
            tensors[name] = value
            continue
        rows, columns = value.shape
        blocks = value.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3)) / 400
        tensors[name] = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    quantization = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    return rewritten(folder, tensors, {**quantization, "dequantize": True})


def mxfp4_folder(folder: Path) -> Path:
    """A gpt-oss whose experts are 4-bit floats with an exponent for 32 of them."""
    torch.manual_seed(0)
    config = tf.GptOssConfig(
        **SMALL, num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    )
    tf.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tensors = {}
    g = torch.Generator().manual_seed(1)
    for name, value in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value
            continue
        experts, inner, outer = value.shape  # files have them the other way round
        shape = (experts, outer, inner // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=g, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(115, 127, shape, generator=g, dtype=torch.uint8)
    return rewritten(folder, tensors, {"quant_method": "mxfp4", "dequantize": True, "modules_to_not_convert": []})


def rewritten(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> Path:
    """The folder with other tensors."""
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


FOLDERS = {"fp8": fp8_folder, "mxfp4": mxfp4_folder}


@pytest.fixture(autouse=True)
def nobody_else_streams() -> None:
    """Training arguments of earlier tests that wait to be collected would have the stock models below streamed as well."""
    gc.collect()


@pytest.mark.parametrize("kind", FOLDERS)
def test_streamed_weights_are_the_stock_ones_bit_for_bit(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    stock = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    before = bytes_read()
    model = hf_dist.from_pretrained(tf.AutoModelForCausalLM, folder, dtype=torch.bfloat16)
    assert lazy_sources(model).keys() == dict(stock.named_parameters()).keys()
    assert bytes_read() - before < 4096  # fingerprints, buffers
    for name, param in model.named_parameters():
        source, wanted = lazy_source(param), stock.get_parameter(name).detach().reshape(-1)
        assert source is not None
        numel = wanted.numel()
        for first, last in ((0, numel), (numel // 3, numel // 3 + 1), (numel // 7 + 3, numel - 5)):
            out = torch.empty(max(last - first, 0), dtype=param.dtype)
            source.read(first, max(last, first), out)
            assert torch.equal(out, wanted[first:last]), (name, first, last)
        spots = [0, numel // 2, numel - 1]
        assert torch.equal(source.sample(spots), wanted[spots]), name


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_share_of_the_experts_reads_its_bytes_only(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    stock = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = hf_dist.from_pretrained(tf.AutoModelForCausalLM, folder, dtype=torch.bfloat16)
    names = [
        name for name, p in model.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    assert names
    for name in names:
        param = model.get_parameter(name)
        held = TensorSlice.along(tuple(param.shape), 0, (2, 4))
        wanted = held.take(stock.get_parameter(name).detach()).reshape(-1)
        keep_slice(param, held, "ep")
        source = lazy_source(param)
        assert source is not None
        before = bytes_read()
        out = torch.empty(held.numel, dtype=param.dtype)
        source.read(0, held.numel, out)
        assert torch.equal(out, wanted), name
        # One byte or half a byte for each element, and the scales; transposed stacks are read in chunks of whole rows.
        assert bytes_read() - before <= held.numel * (1 + 4 / BLOCK**2 + 0.1)


def test_a_load_that_is_not_dequantised_is_not_streamed() -> None:
    from types import SimpleNamespace

    from hf_dist.hf.dequantise import dequantises

    def quantizer(method: str, dequantize: bool) -> Any:
        return SimpleNamespace(quantization_config=SimpleNamespace(quant_method=method, dequantize=dequantize))

    assert dequantises(quantizer("fp8", True)) and dequantises(quantizer("mxfp4", True))
    assert not dequantises(quantizer("fp8", False)) and not dequantises(quantizer("bitsandbytes", True))
