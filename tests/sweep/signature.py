"""A value for every argument that a class's forward names: what its trial gives, beside a batch or instead of a part of it."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, MoEModelOutput

from tests.sweep.modalities import modal_changes
from tests.sweep.tiny import tiny_batches

Batch = dict[str, Any]
Call = Callable[[Any, Batch], Any]
"""(model, batch) -> what its forward returns."""
LABELS = {"labels", "next_sentence_label", "sentence_order_label", "start_positions", "end_positions"}
FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits", "use_cache")
PREFIX = 4
"""Tokens that go into a cache first."""


def drawn(seed: int) -> torch.Generator:
    """The same for each batch."""
    return torch.Generator().manual_seed(seed)


def plain_call(model: Any, batch: Batch) -> Any:
    """One forward."""
    return model(**batch)


def first_batch(task: str, model: Any) -> Batch:
    """Rows padded on the right, with every label that the forward takes."""
    batch: Batch = tiny_batches({"tokens": "masked", "pretraining": "masked"}.get(task, task), model)[0]
    if "input_ids" not in batch:
        return batch
    rows, length = batch["input_ids"].shape
    tokens = batch.pop("labels")
    takes = inspect.signature(model.forward).parameters
    draw = drawn(5)
    if "labels" in takes:
        batch["labels"] = torch.randint(0, 2, (rows, length), generator=draw) if task == "tokens" else tokens
    for name in ("next_sentence_label", "sentence_order_label"):
        if name in takes:
            batch[name] = torch.randint(0, 2, (rows,), generator=draw)
    if "start_positions" in takes and task == "answers":
        batch.pop("labels", None)
        batch["start_positions"] = torch.randint(1, length // 2, (rows,), generator=draw)
        batch["end_positions"] = batch["start_positions"] + 2
    return batch


def named(model: Any) -> list[str]:
    """The arguments of the forward."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [name for name, p in inspect.signature(model.forward).parameters.items() if p.kind not in kinds]


def trials(model: Any, batch: Batch) -> Iterator[tuple[str, str, Call, Batch]]:
    """(argument, variant, call, batch) of everything that is tried; the first is the batch as it is."""
    yield "", "", plain_call, batch
    if "input_ids" in batch:
        takes = named(model)
        for (argument, variant), change in _changes(model, batch).items():
            if (argument in takes or argument in FLAGS) and (
                "decoder's" not in variant or "decoder_input_ids" in takes
            ):
                yield argument, variant, plain_call, {k: v for k, v in (batch | change).items() if v is not None}
        if "past_key_values" in takes:
            for variant, call in CACHED.items():
                yield "past_key_values", variant, call, batch
        for argument in STATES:
            if argument in takes:
                yield argument, "after a prefix", functools.partial(_with_state, argument), batch
    else:
        for flag in FLAGS[:2]:
            for value in (True, False):
                yield flag, str(value), plain_call, batch | {flag: value}
        if "attention_mask" in named(model):
            yield "attention_mask", "", plain_call, batch | {"attention_mask": _mask_of_patches(model, batch)}
        if "interpolate_pos_encoding" in named(model):
            yield "interpolate_pos_encoding", "", plain_call, batch | {"interpolate_pos_encoding": True}
    yield "return_dict", "a tuple", plain_call, batch | {"return_dict": False}
    yield "labels", "none", plain_call, {key: value for key, value in batch.items() if key not in LABELS}


@torch.no_grad()
def _mask_of_patches(model: Any, batch: Batch) -> torch.Tensor:
    """One for each token that the model makes of an image, the last one hidden in the first row."""
    states = model(**batch | {"output_hidden_states": True}).hidden_states
    mask = torch.ones(states[0].shape[:2], dtype=torch.long)
    mask[0, -1] = 0
    return mask


def _with_cache(model: Any, batch: Batch) -> Any:
    """The first tokens through the same model, which makes a cache, then the others."""
    ids, mask = batch["input_ids"], torch.ones_like(batch["input_ids"])
    with torch.no_grad():
        first = model(input_ids=ids[:, :PREFIX], attention_mask=mask[:, :PREFIX], use_cache=True)
    return model(input_ids=ids[:, PREFIX:], attention_mask=mask, past_key_values=first.past_key_values)


def _a_token_later(model: Any, batch: Batch) -> Any:
    """One token after the others, without a mask and without gradients: recurrences write into their cache."""
    ids = batch["input_ids"]
    with torch.no_grad():
        first = model(input_ids=ids[:, :-1], use_cache=True)
        return model(input_ids=ids[:, -1:], past_key_values=first.past_key_values)


def _into_cache(model: Any, batch: Batch) -> Any:
    """The first tokens into a cache that is given."""
    ids, mask = batch["input_ids"], torch.ones_like(batch["input_ids"])
    if model.config.is_encoder_decoder:
        raise TypeError("a pair has a cache of its own kind")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :PREFIX], attention_mask=mask[:, :PREFIX], past_key_values=cache)
    return model(input_ids=ids[:, PREFIX:], attention_mask=mask, past_key_values=cache)


def _with_cached_pair(model: Any, batch: Batch) -> Any:
    """The first tokens of the decoder, then the others."""
    ids, targets = batch["input_ids"], batch["input_ids"].flip(1)
    with torch.no_grad():
        first = model(input_ids=ids, decoder_input_ids=targets[:, :PREFIX], use_cache=True)
    return model(input_ids=ids, decoder_input_ids=targets[:, PREFIX:], past_key_values=first.past_key_values)


def _a_decoder_token_later(model: Any, batch: Batch) -> Any:
    """One token of the decoder, then another."""
    ids, targets = batch["input_ids"], batch["input_ids"].flip(1)
    with torch.no_grad():
        first = model(input_ids=ids, decoder_input_ids=targets[:, :1], use_cache=True)
    return model(input_ids=ids, decoder_input_ids=targets[:, 1:2], past_key_values=first.past_key_values)


STATES = ("cache_params", "state", "mems", "cache")
"""What recurrent models return for their next tokens, under the name by which their forward takes it."""


def _with_state(name: str, model: Any, batch: Batch) -> Any:
    """A token after the others, with the state that the same model returns."""
    ids = batch["input_ids"]
    if name == "cache":  # XLM's: no output returns it
        state = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        with torch.no_grad():
            model(input_ids=ids[:, :-1], cache=state)
            return model(input_ids=ids, cache=state)  # it leaves out what the cache holds
    flag = {"use_mems": True} if name == "mems" else {"use_cache": True}
    with torch.no_grad():
        first = model(input_ids=ids[:, :-1], **flag)
        state = first[name]
        return model(input_ids=ids[:, -1:], **{name: state}, **flag)


CACHED: dict[str, Call] = {
    "after a prefix": _with_cache,
    "a token later": _a_token_later,
    "a given cache": _into_cache,
    "after a decoder's prefix": _with_cached_pair,
    "a decoder's token later": _a_decoder_token_later,
}
"""How a cache comes to be given; a model takes one of them or several."""


def _changes(model: Any, batch: Batch) -> dict[tuple[str, str], Batch]:
    """(argument, variant) -> what is given; None takes away."""
    ids = batch["input_ids"]
    rows, length = ids.shape
    width = _width(model)
    places = torch.arange(length)[None].repeat(rows, 1)
    left = torch.ones_like(ids)
    left[0, :3] = 0
    embeds = 0.1 * torch.randn(rows, length, width, generator=drawn(3))
    pairs = torch.zeros_like(ids)
    pairs[:, length // 3 :] = 1
    sides: dict[tuple[str, str], Batch] = {
        ("attention_mask", "none"): {"attention_mask": None},
        ("attention_mask", "padded on the left"): {"attention_mask": left},
        ("inputs_embeds", ""): {"input_ids": None, "inputs_embeds": embeds},
        ("position_ids", ""): {"position_ids": places},
        ("position_ids", "packed"): {"attention_mask": None, "position_ids": places % (length // 2)},
        ("token_type_ids", ""): {"token_type_ids": pairs},
        ("token_type_ids", "of tables"): {"token_type_ids": torch.zeros(rows, length, 7, dtype=torch.long)},
        ("logits_to_keep", ""): {"logits_to_keep": 3} | dict.fromkeys(LABELS & batch.keys()),
        ("inputs_embeds", "beside a decoder's ids"): {
            "input_ids": None,
            "inputs_embeds": embeds,
            "decoder_input_ids": ids,
        },
        **{(name, str(value)): {name: value} for name in FLAGS for value in (True, False)},
    }
    hidden = getattr(model.config, "hidden_size", None) or width
    return (
        sides
        | _of_encoders(batch, width, hidden)
        | _of_tokens(model, ids, width)
        | modal_changes(copy.deepcopy(model), batch)
    )


def _width(model: Any) -> int:
    """Of the embedded tokens."""
    try:
        return int(model.get_input_embeddings().weight.shape[1])
    except NotImplementedError:  # Canine hashes its characters
        return int(model.config.get_text_config().hidden_size)


def _of_encoders(batch: Batch, width: int, hidden: int) -> dict[tuple[str, str], Batch]:
    ids = batch["input_ids"]
    rows, length = ids.shape
    states = torch.randn(rows, length + 3, hidden, generator=drawn(4))
    seen = torch.ones(rows, length + 3, dtype=torch.long)
    seen[0, -2:] = 0
    labels = batch.get("labels")
    targets = (labels if labels is not None and labels.shape == ids.shape else ids).clamp(min=1)
    mask = torch.ones_like(targets)
    mask[:, -1] = 0
    return {
        ("encoder_hidden_states", ""): {"encoder_hidden_states": states},
        ("encoder_hidden_states", "as long"): {"encoder_hidden_states": states[:, :length]},
        ("encoder_attention_mask", "as long"): {
            "encoder_hidden_states": states[:, :length],
            "encoder_attention_mask": seen[:, -length:],
        },
        ("encoder_attention_mask", ""): {"encoder_hidden_states": states, "encoder_attention_mask": seen},
        ("encoder_outputs", ""): {"encoder_outputs": BaseModelOutput(last_hidden_state=states[:, :length])},
        ("encoder_outputs", "of experts"): {"encoder_outputs": MoEModelOutput(last_hidden_state=states[:, :length])},
        ("decoder_input_ids", ""): {"decoder_input_ids": targets.flip(1)},
        ("decoder_attention_mask", ""): {"decoder_attention_mask": mask},
        ("decoder_inputs_embeds", ""): {
            "decoder_inputs_embeds": 0.1 * torch.randn(rows, targets.shape[1], width, generator=drawn(6))
        },
        ("decoder_inputs_embeds", "without labels, a decoder's"): {
            "labels": None,
            "decoder_inputs_embeds": 0.1 * torch.randn(rows, length, width, generator=drawn(6)),
        },
        ("logits_to_keep", "with a decoder's ids"): {"labels": None, "decoder_input_ids": ids, "logits_to_keep": 3},
        ("decoder_position_ids", ""): {"decoder_position_ids": torch.arange(targets.shape[1])[None].repeat(rows, 1)},
    }


ONE_PER_TOKEN = (
    *("langs", "task_type_ids", "input_shape_ids", "input_pronunciation_ids", "lang_ids", "global_attention_mask"),
    *("mm_token_type_ids", "sequence_id", "padding_mask"),
)


def _of_tokens(model: Any, ids: torch.Tensor, width: int) -> dict[tuple[str, str], Batch]:
    """Arguments of a few classes."""
    rows, length = ids.shape
    config = model.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 2)
    per_layer = getattr(config, "hidden_size_per_layer_input", 8) or 8
    boxes = torch.randint(0, 20, (rows, length, 2), generator=drawn(8))
    first = torch.zeros_like(ids)
    first[:, 0] = 1
    paths = getattr(config, "max_depth", 50)
    contrasts = {f"{which}_{name}": value for which in ("attack", "labels") for name, value in {
        "input_ids": ids.flip(1), "input_shape_ids": first, "input_pronunciation_ids": first,
        "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}.items()}  # fmt: skip
    proteins = {"protein_input_ids": ids % 16 + 4, "protein_attention_mask": torch.ones_like(ids)}
    looked_at = {"cross_attention_states": torch.randn(rows, 6, width, generator=drawn(12))}
    return {
        **{(name, ""): {name: first} for name in ONE_PER_TOKEN},
        **{(name, ""): contrasts for name in contrasts},
        ("cross_attention_states", ""): looked_at,
        ("cross_attention_mask", ""): looked_at | {"cross_attention_mask": torch.zeros(rows, 1, length, 6)},
        ("full_text_row_masked_out_mask", ""): looked_at
        | {
            "cross_attention_mask": torch.zeros(rows, 1, length, 6),
            "full_text_row_masked_out_mask": torch.ones(rows, 1, length, 1),
        },
        **{(name, ""): proteins for name in proteins},
        ("bbox", ""): {"bbox": torch.cat([boxes, boxes + 5], dim=-1)},
        ("lengths", ""): {"lengths": torch.full((rows,), length), "attention_mask": None},
        ("question_lengths", ""): {"question_lengths": torch.full((rows, 1), 3)},
        ("question_positions", ""): {
            "question_positions": torch.full((rows, 1), 2),
            "start_positions": None,
            "end_positions": None,
        },
        ("num_hashes", ""): {"num_hashes": 1},
        ("perm_mask", ""): {"perm_mask": torch.ones(rows, length, length).tril(-1)},
        ("target_mapping", ""): {
            "perm_mask": torch.zeros(rows, length, length),
            "target_mapping": torch.eye(length)[None].repeat(rows, 1, 1),
        },
        ("input_mask", ""): {"attention_mask": None, "input_mask": torch.cat([first[:, 1:], first[:, :1]], dim=1).float()},
        ("use_mems", ""): {"use_mems": True},
        ("per_layer_inputs", ""): {
            "input_ids": None,
            "inputs_embeds": 0.1 * torch.randn(rows, length, width, generator=drawn(3)),
            "per_layer_inputs": 0.1 * torch.randn(rows, length, layers, per_layer, generator=drawn(9))
        },
        ("xpath_tags_seq", ""): {"xpath_tags_seq": torch.randint(0, 5, (rows, length, paths), generator=drawn(10))},
        ("xpath_subs_seq", ""): {"xpath_subs_seq": torch.randint(0, 5, (rows, length, paths), generator=drawn(11))},
        ("entity_ids", ""): _entities(rows),
        ("entity_attention_mask", ""): _entities(rows) | {"entity_attention_mask": torch.ones(rows, 2, dtype=torch.long)},
        ("entity_token_type_ids", ""): _entities(rows) | {"entity_token_type_ids": torch.zeros(rows, 2, dtype=torch.long)},
        ("entity_position_ids", ""): _entities(rows),
        ("entity_labels", ""): _entities(rows) | {"entity_labels": torch.ones(rows, 2, dtype=torch.long)},
    }  # fmt: skip


def _entities(rows: int) -> Batch:
    places = torch.full((rows, 2, 3), -1)
    places[:, :, 0] = torch.tensor([1, 4])
    return {"entity_ids": torch.ones(rows, 2, dtype=torch.long), "entity_position_ids": places}


NO_ENCODER = r"GPT2LMHeadModel|GPTBigCodeForCausalLM|XGLMForCausalLM"
DECODERS_OF_PAIRS = r"(Bart|BigBirdPegasus|MBart|MT5|PLBart|T5|T5Gemma|T5Gemma2|UMT5|Mvp)ForSequenceClassification"
NOT_TAKEN: list[tuple[str, str, str]] = [
    (NO_ENCODER, "encoder_.*", "needs add_cross_attention: the row of that"),
    (
        DECODERS_OF_PAIRS,
        ".*inputs_embeds",
        "looks for the end of a sentence in the ids; its forward passes it to no one",
    ),
    (r"T5Gemma2?For.*Classification", "use_cache", "passes it twice"),
    (r"BigBirdFor(CausalLM|MaskedLM)", "encoder_attention_mask", "masks its own tokens by it"),
    (r"BioGptForSequenceClassification", "logits_to_keep", "looks at the last token of rows that it has cut"),
    (r"FSMT.*|Florence2.*", "decoder_inputs_embeds", "makes the decoder's ids of the input, and then has both"),
    (r"(Bailing|Bamba|GraniteMoeHybrid|Jamba|KimiLinear|Zamba).*", "past_key_values", "HF's cache of its own kind"),
    (r"FSMT.*", "past_key_values", "HF's own assertion"),
    (r"xLSTM.*", "cache_params", "HF's own state has another shape than its layers take"),
    (
        r"Gemma4(Unified)?ForConditionalGeneration",
        ".*(image|video|pixel|feature|encoder).*",
        "the default config has no towers",
    ),
    (r"Gemma4.*", "inputs_embeds", "must be rows of the embedding, which it looks up again"),
    (r"DeepseekV4.*|Esmc.*|LayoutLMv3.*|Longformer.*", "inputs_embeds", "reads the ids too"),
    (r".*Tokens?Classification|.*QuestionAnswering", "past_key_values", "its output has none to give"),
    (r"Llava(Next(Video)?)?ForConditionalGeneration", "image_sizes", "for towers that take them, not CLIP's"),
]
"""(class, argument, why): named by a signature, not usable for a class as its default config builds it."""


def not_taken(name: str, argument: str) -> str:
    """Why a class cannot use an argument that its forward names, or ""."""
    for of_class, pattern, why in NOT_TAKEN:
        if re.fullmatch(of_class, name) and re.fullmatch(pattern, argument):
            return why
    return ""
