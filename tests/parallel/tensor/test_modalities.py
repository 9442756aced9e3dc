"""Models that read images, sounds, series or trajectories: their plans were tried on such inputs, or they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.parallel.tensor.choose import choose_plan
from hf_dist.parallel.tensor.trial import trial_batches
from hf_dist.parallel.tensor.verify import Unsplit, compute, unsplit
from hf_dist.sharding.units import find_unit_modules
from tests.covering import FULL_GRID
from tests.sweep.layouts import cut
from tests.sweep.tiny import builders

SMALL: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
TEXT: dict[str, Any] = dict(vocab_size=99, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0)
IMAGE: dict[str, Any] = dict(**SMALL, image_size=16, patch_size=8)
MASKED: dict[str, Any] = dict(decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4)
MASKED |= dict(decoder_intermediate_size=48)
SOUND: dict[str, Any] = dict(**SMALL, vocab_size=32, conv_dim=(16, 16), conv_stride=(4, 2), conv_kernel=(6, 3))
SOUND |= dict(num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2)
SERIES: dict[str, Any] = dict(context_length=8, prediction_length=4, d_model=16)
MODELS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "images": ("ViTForImageClassification", IMAGE, {"pixel_values"}),
    "masked images": ("ViTMAEForPreTraining", IMAGE | MASKED, {"pixel_values", "noise"}),
    "texts beside images": (
        "CLIPModel",
        dict(text_config={**SMALL, **TEXT}, vision_config=IMAGE),
        {"input_ids", "attention_mask", "pixel_values"},
    ),
    "waves": ("Wav2Vec2ForCTC", SOUND, {"input_values"}),
    "series": ("PatchTSTForPrediction", dict(**SERIES, patch_length=4, num_input_channels=2), {"past_values"}),
    "trajectories": (
        "DecisionTransformerModel",
        dict(state_dim=3, act_dim=2, hidden_size=32, n_layer=2, n_head=4),
        {"states", "actions", "rewards", "returns_to_go", "timesteps"},
    ),
}


def model(kind: str, fields: dict[str, Any]) -> nn.Module:
    cls = getattr(tf, kind)
    with torch.device("meta"):
        return cls(cls.config_class(**fields))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS if FULL_GRID else [name for name in MODELS if name != "trajectories"])
def test_a_plan_is_verified_on_the_inputs_that_the_class_reads(name: str) -> None:
    kind, fields, inputs = MODELS[name]
    made = model(kind, fields)
    tried: Unsplit = unsplit(made, 2)
    assert inputs <= tried.batches[0].keys()
    assert all(g.any() for n, g in tried.gradients.items() if "layers.0" in n and n.endswith("weight"))
    assert choose_plan(made, 2, find_unit_modules).params


def test_every_output_takes_part_in_the_trial() -> None:
    """A trial of the first output alone would say nothing of the pooler, which only the second one reads."""
    gradients = unsplit(model("BertModel", {**SMALL, **TEXT}), 2).gradients
    assert gradients["pooler.dense.weight"].any()


def test_a_model_without_products_to_cut_is_refused_for_that() -> None:
    fields = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    with pytest.raises(ModelError, match=r"ResNet.* cannot be split. It has no plan"):
        choose_plan(model("ResNetForImageClassification", fields), 2, find_unit_modules)


def test_a_model_on_which_no_trial_runs_is_refused_with_what_was_tried() -> None:
    class Asks(tf.BertForSequenceClassification):
        def forward(self, input_ids: Any, knob: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return super().forward(input_ids, **kwargs)

    config = tf.BertConfig(**SMALL, **TEXT)
    with pytest.raises(ModelError, match=r"no tiny copy of Asks .*knob.*tried: input_ids"):
        choose_plan(Asks(config), 2, find_unit_modules)


def test_a_model_that_draws_random_numbers_is_refused_for_that() -> None:
    class Noisy(tf.BertForSequenceClassification):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            found.logits = found.logits + torch.randn_like(found.logits)
            return found

    with pytest.raises(ModelError, match="it draws random numbers"):
        choose_plan(Noisy(tf.BertConfig(**SMALL, **TEXT)), 2, find_unit_modules)


def test_a_rate_that_is_no_field_of_the_config_is_no_random_number_of_a_trial() -> None:
    """Heads of HF's generic classes drop by 0.1 unless their config has a field that most configs lack."""
    fields = dict(**SMALL, **TEXT, num_key_value_heads=2)
    assert choose_plan(model("LlamaForTokenClassification", fields), 2, find_unit_modules).params


def test_a_forward_that_replaces_modules_is_refused_by_the_name_of_one() -> None:
    """Long rows of BigBird keep the modules that were split; the first short ones do not."""
    fields = {**SMALL, **TEXT, "max_position_embeddings": 64, "num_random_blocks": 1, "block_size": 4}
    with pytest.raises(ModelError, match=r"BigBirdForMaskedLM replaces bert\.encoder.*original_full"):
        choose_plan(model("BigBirdForMaskedLM", fields), 2, find_unit_modules)
    assert choose_plan(
        model("BigBirdForMaskedLM", {**fields, "attention_type": "original_full"}), 2, find_unit_modules
    ).params


def test_a_trial_of_tokens_comes_first_and_holds_padding() -> None:
    batches = next(trial_batches(tf.BertForMaskedLM(tf.BertConfig(**SMALL, **TEXT))))
    assert [b["input_ids"].shape for b in batches] == [(2, 12), (2, 11)]
    assert all((b["attention_mask"][0] == 0).sum() == 3 for b in batches)
    assert compute(
        tf.BertForMaskedLM(tf.BertConfig(**SMALL, **TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    )


@pytest.mark.parametrize("name", ["FNetForMaskedLM", "BartForSequenceClassification"])
def test_a_class_without_a_mask_and_one_that_looks_for_the_end_of_a_sentence_are_tried(name: str) -> None:
    """Both were refused, because our trial failed by itself."""
    assert choose_plan(next(builders(getattr(tf, name)))(), 2, find_unit_modules).params


def test_a_factor_for_each_token_is_refused_where_a_rank_has_a_part_of_them() -> None:
    """Mllama multiplies hidden states by a mask of the rows that see no image: a shape error of torch's in its layer."""
    build = next(builders(tf.MllamaForCausalLM))
    batch = {"input_ids": torch.arange(24).view(2, 12) + 3}
    given = {
        "cross_attention_states": torch.randn(2, 6, 32),
        "cross_attention_mask": torch.zeros(2, 1, 12, 6),
        "full_text_row_masked_out_mask": torch.ones(2, 1, 12, 1),
    }
    run = cut(build, batch)
    with pytest.raises(ModelError, match=r'given full_text_row_masked_out_mask.*"sequence_regions": false'):
        run(lambda model, call: model(**call), batch | given)
