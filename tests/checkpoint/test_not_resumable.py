"""A folder that no Trainer can go on from is named with the program that wrote it, or with the checkpoints that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_dist.checkpoint.not_resumable import why_not

FOLDERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torchtitan": ((".metadata", "__0_0.distcp"), ("distributed checkpoints", "dcp_to_torch")),
    "torchtitan's steps": (("step-3/.metadata",), ("distributed checkpoints", "dcp_to_torch")),
    "megatron": (
        ("latest_checkpointed_iteration.txt", "iter_0000003/mp_rank_00/model_optim_rng.pt"),
        ("Megatron", "Convert"),
    ),
    "megatron's step": (("mp_rank_00/model_optim_rng.pt",), ("Megatron",)),
    "deepspeed's part": (("mp_rank_00_model_states.pt",), ("DeepSpeed", "the folder above")),
    "counts alone": (
        ("trainer_state.json", "notes.txt"),
        ("it has no weights (there is notes.txt, trainer_state.json)",),
    ),
    "torchtitan with counts": (("trainer_state.json", ".metadata"), ("distributed checkpoints",)),
    "lightning": (("last.ckpt",), ("Lightning", "ckpt_path")),
    "accelerate": (("random_states_0.pkl", "model.safetensors", "optimizer.bin"), ("save_state", "load_state")),
    "a model": (("config.json", "model.safetensors"), ("without a training state", "from_pretrained")),
    "an adapter": (
        ("adapter_config.json", "adapter_model.safetensors"),
        ("without a training state", "from_pretrained"),
    ),
    "anything": (("notes.txt",), ("no checkpoint of a Trainer", "there is notes.txt", "No checkpoint lies in it")),
    "nothing": ((), ("there is nothing",)),
    "an output folder": (
        ("checkpoint-2/trainer_state.json", "checkpoint-10/trainer_state.json"),
        ("In it lie checkpoint-2, checkpoint-10; the newest complete one is checkpoint-10.",),
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_foreign_folder_is_named_with_the_way_to_use_it(name: str, tmp_path: Path) -> None:
    files, words = FOLDERS[name]
    folder = tmp_path / "given"
    folder.mkdir()
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True, parents=True)
        (folder / file).write_text("")
    text = why_not(folder)
    assert text is not None and str(folder) in text
    for word in words:
        assert word in text, text


def test_what_is_not_there_is_answered_with_what_is(tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
        for file in ("trainer_state.json", "model.safetensors"):
            (tmp_path / f"checkpoint-{step}" / file).write_text("{}")
    text = why_not(tmp_path / "checkpoint-3")
    assert text == (
        f"{tmp_path}/checkpoint-3 does not exist. In {tmp_path.name} lie checkpoint-2, checkpoint-4; the newest complete one "
        "is checkpoint-4."
    )
    assert why_not(tmp_path / "checkpoint-4") is None
    (tmp_path / "checkpoint-4" / "model.safetensors").rename(tmp_path / "checkpoint-4" / "own.ckpt")
    assert "Lightning" in str(why_not(tmp_path / "checkpoint-4"))
    assert why_not(tmp_path / "checkpoint-4", loads_itself=True) is None, "the Trainer has its own files"
    (tmp_path / "last.ckpt").write_text("")
    assert "Trainer.fit(ckpt_path=...)" in str(why_not(tmp_path / "last.ckpt"))
    assert "takes a checkpoint's folder" in str(why_not(tmp_path / "checkpoint-4" / "trainer_state.json"))
