"""What cannot be right on parts of a sequence is refused by name, on every rank, before it trains or at the first batch."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.parallel.sequence import standins
from tests.parallel.sequence.families import VOCABULARY, make_model
from tests.parallel.sequence.standins import use_kernel
from tests.sweep.tiny import builders


def _bloom(t: Any) -> Any:
    return t.BloomForCausalLM(t.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4))


def _xlstm(t: Any) -> Any:
    return next(builders(t.xLSTMForCausalLM))()


def _conv_bert(t: Any) -> Any:
    config = t.ConvBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        embedding_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    return t.ConvBertForMaskedLM(config)


def _mobile_bert(t: Any) -> Any:
    return next(builders(t.MobileBertForSequenceClassification))()


def _xlnet(t: Any) -> Any:
    return next(builders(t.XLNetForSequenceClassification))()


def _counting(kernel: str) -> Any:
    """A Llama that counts positions of its own a little, and attends by a kernel whose half precision would hide it."""

    def count(module: Any, args: object, embedded: torch.Tensor) -> torch.Tensor:
        places = torch.arange(embedded.shape[1], device=embedded.device, dtype=embedded.dtype)
        return embedded + 1.3e-5 * places[:, None]

    model = make_model("llama")
    model.model.embed_tokens.register_forward_hook(count)
    use_kernel(model, kernel)
    return model


MODELS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "encoder and decoder in a ring": (
        lambda t: make_model("bart"),
        {"sequence_parallel": "ring"},
        "attends from a decoder to an encoder",
    ),
    "encoder and decoder between stages": (
        lambda t: make_model("bart"),
        {"ranks": 4, "stages": 2},
        "whose rows are not split in a pipeline",
    ),
    "relative biases": (_bloom, {}, "(transformer.h.0.self_attention.dense); none of its layers attends"),
    "8 thousandths, less than bf16 rounds": (_xlnet, {}, "its outputs differ by 8.5e-03 of their size"),
    "5 thousandths, in flash_attn": (
        lambda t: _counting("flash_attention_2"),
        {"sequence_parallel": "gather"},
        "its outputs differ by 5.",
    ),
    "5 thousandths, in flex attention": (lambda t: _counting("flex_attention"), {}, "its outputs differ by 5."),
    "recurrence": (_xlstm, {}, "outside of attention (backbone.blocks.0.mlstm_layer"),
    "convolution": (_conv_bert, {}, "convbert.encoder.layer.0.attention.self.key_conv_attn_layer.depthwise"),
    "neighbours, seen by the first token alone": (_mobile_bert, {}, "(mobilebert.embeddings.embedding_transformation)"),
    "images alone": (lambda t: next(builders(t.ViTForImageClassification))(), {}, "reads no tokens of a vocabulary"),
    "heads of a recurrence": (
        lambda t: make_model("qwen3next"),
        {"ranks": 3},
        "3 ranks cannot share the 4 heads or channels (num_v_heads) of Qwen3NextGatedDeltaNet",
    ),
    "heads": (
        lambda t: make_model("llama-odd"),
        {"sequence_parallel": "ulysses", "ranks": 4},
        '"auto" (ulysses 2 x gather 2',
    ),
    "soft-capping in a ring": (
        lambda t: make_model("gemma2"),
        {"sequence_parallel": "ring"},
        "with softcap, which a ring",
    ),
    "sinks in a ring": (
        lambda t: make_model("gptoss"),
        {"sequence_parallel": "ring"},
        "with s_aux, which a ring cannot",
    ),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "": {},
    " in bf16": {"bf16": {"enabled": True}},
    " under autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
"""A model is the same or another one on parts, whatever rounds."""


def precisions_of(name: str) -> list[str]:
    """All of them where rounding could hide the difference; of the other models, the first one by default."""
    return [*PRECISIONS] if FULL_GRID or "thousandths" in name else [""]


IDS = torch.arange(24).view(2, 12) + 3
LEFT = torch.ones(2, 12, dtype=torch.long).index_fill(1, torch.arange(3), 0)
CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a mask of one's own": ("llama", {"attention_mask": torch.ones(2, 1, 12, 12)}, "attention_mask is (2, 1, 12, 12)"),
    "attention weights": ("llama", {"output_attentions": True}, "output_attentions"),
    "images": ("llama", {"pixel_values": torch.ones(2, 3, 8, 8)}, "pixel_values was given"),
    "images that were encoded before": (
        "llama",
        {"mm_encoder_outputs": {"image": [torch.ones(2, 3, 32)]}},
        "was called with mm_encoder_outputs",
    ),
    "positions in planes": (
        "llama",
        {"position_ids": torch.ones(3, 2, 12, dtype=torch.long)},
        "position_ids is (3, 2, 12)",
    ),
    "labels of rows": ("llama", {"labels": torch.ones(2, dtype=torch.long)}, "labels is (2,)"),
    "padding on the left": ("opt", {"attention_mask": LEFT}, "padded on the left"),
    "padding on the left, chunks": ("llama4", {"attention_mask": LEFT}, "padded on the left"),
    "flash attention to packed rows, gathered": (
        "llama",
        {"position_ids": torch.arange(12).remainder(6).expand(2, -1), "kernel": "flash_attention_2"},
        "LlamaAttention attends by flash attention to packed rows, which gathered keys cannot",
    ),
}


def attempt(rank: int, world: int) -> dict[str, str]:
    """What each model or call says."""
    import transformers

    import hf_dist

    said: dict[str, str] = {}

    def config(stages: int = 1, **ours: Any) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3},
            "sequence_parallel_size": world // stages,
            "pipeline": {"stages": stages},
            "hf_dist": {"stall_report_seconds": 0, **ours},
        }

    cases = [(name, precision) for name in MODELS for precision in precisions_of(name)]
    for name, precision in cases:
        build, ours, _ = MODELS[name]
        ours = dict(ours)
        if ours.pop("ranks", 2) != world:
            continue
        try:
            torch.manual_seed(0)
            hf_dist.initialize(build(transformers), config={**config(**ours), **PRECISIONS[precision]})
            said[name + precision] = "accepted"
        except Exception as error:
            said[name + precision] = f"{type(error).__name__}: {error}"
    for precision, section in PRECISIONS.items() if world == 2 else ():
        hf_dist.initialize(make_model("llama"), config={**config(sequence_parallel="ring"), **section})
        said["a ring" + precision] = "accepted"
    for name, (family, changes, _) in CALLS.items() if world == 2 else ():
        try:
            model, changes = make_model(family), dict(changes)
            kernel = changes.pop("kernel", None)
            if kernel:
                use_kernel(model, kernel)
            engine = hf_dist.initialize(model, config=config(**({"sequence_parallel": "gather"} if kernel else {})))
            engine(**{"input_ids": IDS, "labels": IDS, "use_cache": False, **changes})
            said[name] = "accepted"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said | (other_rows(world) if world % 2 == 0 else {})


def half_only(rank: int, world: int) -> bool:
    """A model in bf16 with a kernel that takes nothing else, as flash_attn's: the model is compared without it."""
    import hf_dist

    plain = standins.flash_attn_func

    def strict(query: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        if query.dtype == torch.float32:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        return plain(query, *args, **how)

    with mock.patch.object(standins, "flash_attn_func", strict):
        use_kernel(model := make_model("llama"), "flash_attention_2")
        config = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": world, **PRECISIONS[" in bf16"]}
        return hf_dist.initialize(model, config=config).split_sequence is not None


def other_rows(world: int) -> dict[str, str]:
    """A loader that counts processes along the sequence: ranks that share rows read others. And the mode before that."""
    import hf_dist

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "sequence_parallel_size": 2,
        "tensor_parallel": {"autotp_size": world // 2},
        "hf_dist": {"stall_report_seconds": 0},
    }
    engine = hf_dist.initialize(make_model("llama").train(), config=config)
    mode = "training" if engine.model.training else "evaluation"
    engine.train()
    try:
        engine(input_ids=IDS + engine.mesh.cp.rank, labels=IDS)
        said = "accepted"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return {"mode": mode, "other rows": said}


@functools.cache
def ranks(world: int) -> list[dict[str, str]]:
    return run_ranks(attempt, world)


@pytest.mark.parametrize("name", [*MODELS, *CALLS])
def test_is_refused_by_name_on_every_rank(name: str) -> None:
    case = MODELS.get(name) or CALLS[name]
    world = case[1].get("ranks", 2) if name in MODELS else 2
    assert len(ranks(world)) == world
    for said in ranks(world):
        for precision in precisions_of(name) if name in MODELS else [""]:
            assert case[2] in said[name + precision]
            assert said[name + precision].startswith(("ModelError", "ConfigError"))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_other_rows_are_told_whichever_axis_is_between_them(world: int) -> None:
    """On four ranks the ones that cut matrices read the same rows, and the ones that share them do not."""
    split = world // 2
    for rank, said in enumerate(ranks(world)):
        first = rank % split
        assert said["other rows"].startswith(f"ModelError: rank {first + split} reads another batch than rank {first}")
        assert "sequence_parallel_size 2" in said["other rows"]


def test_a_model_in_training_is_in_training_after_its_check() -> None:
    for said in ranks(2):
        assert said["mode"] == "training"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_only_rounds_otherwise_is_not_refused(precision: str) -> None:
    """Pairs of a ring are added in fp32, products of the whole in bf16."""
    assert {said["a ring" + precision] for said in ranks(2)} == {"accepted"}


def test_a_kernel_that_takes_half_precision_only_is_given_it() -> None:
    assert run_ranks(half_only, 2) == [True, True]
