"""`hf-dist export --merge-lora`: what PEFT's merge of the whole model gives, tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from hf_dist.checkpoint.export import export
from hf_dist.errors import CheckpointError

from .families import VOCAB, make_model

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", dict(target_modules=["q_proj", "down_proj"])),
    "modules": ("llama", dict(target_modules=["v_proj"], modules_to_save=["lm_head"])),
    "patterns": (
        "llama", dict(target_modules=["q_proj", "o_proj"], rank_pattern={"layers.1.self_attn.q_proj": 2},
                      alpha_pattern={"o_proj": 5}, use_rslora=True),
    ),
    "conv1d": ("gpt2", dict(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)),
}  # fmt: skip


def base_and_adapter(root: Path, family: str, dtype: torch.dtype, **config: Any) -> None:
    """Write a base model and an adapter that changes it."""
    base: Any = make_model(family, dtype)
    base.save_pretrained(root / "base", max_shard_size=4000)
    model = get_peft_model(type(base).from_pretrained(root / "base"), LoraConfig(r=3, lora_alpha=7, **config))
    torch.manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.copy_(torch.randn(param.shape))
    model.save_pretrained(root / "adapter")
    (root / "adapter" / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ADAPTERS)
def test_merging_equals_peft(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    family, config = ADAPTERS[name]
    base_and_adapter(tmp_path, family, dtype, **config)
    export(tmp_path / "adapter", tmp_path / "out", merge_lora=True, max_shard_size="10KB")
    base: Any = type(make_model(family)).from_pretrained(tmp_path / "base", dtype="auto")
    PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "stock")
    found, wanted = (
        {k: v for p in (tmp_path / f).glob("*.safetensors") for k, v in load_file(p).items()} for f in ("out", "stock")
    )
    assert found.keys() == wanted.keys()
    for key in wanted:
        # The products are summed row by row here, so the last bit before rounding may differ.
        unit = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-22
        torch.testing.assert_close(found[key].float(), wanted[key].float(), rtol=unit, atol=4e-6)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= names
    assert "adapter_config.json" not in names
    loaded = type(base).from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded(torch.arange(6)[None] % VOCAB).logits.isfinite().all()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (dict(target_modules=["q_proj"], use_dora=True), "use_dora"),
        (dict(target_modules=["q_proj"], init_lora_weights="olora"), "init_lora_weights"),
        (dict(target_modules=["embed_tokens"]), "embed_tokens"),
    ],
)
def test_other_adapters_are_refused_by_name(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    base_and_adapter(tmp_path, "llama", torch.float32, **config)
    with pytest.raises(CheckpointError, match=says):
        export(tmp_path / "adapter", tmp_path / "out", merge_lora=True)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    model: Any = make_model("llama")
    model.save_pretrained(tmp_path / "in")
    with pytest.raises(CheckpointError, match="no adapter"):
        export(tmp_path / "in", tmp_path / "out", merge_lora=True)


@pytest.mark.parametrize("named", [None, "", "a/model-that-is-nowhere"])
def test_an_adapter_that_names_no_base_is_refused_and_takes_one_that_is_given(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # an empty name is no name, not the current folder
    base_and_adapter(tmp_path, "llama", torch.float32, target_modules=["q_proj"])
    file = tmp_path / "adapter" / "adapter_config.json"
    whole = str(tmp_path / "base")
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": named}))
    says = f"is {named!r}, which is neither a folder" if named else "names no base model"
    with pytest.raises(CheckpointError, match=f"{says}.*--base FOLDER"):
        export(tmp_path / "adapter", tmp_path / "out", merge_lora=True)
    with pytest.raises(CheckpointError, match=r"--base .*is read with --merge-lora only"):
        export(tmp_path / "adapter", tmp_path / "out", base=whole)
    export(tmp_path / "adapter", tmp_path / "out", merge_lora=True, base=whole)
    assert (tmp_path / "out" / "model.safetensors").exists()
