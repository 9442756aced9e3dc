"""Images, videos and sounds beside a text: what a class's forward takes of them, with as many tokens as they have vectors.

The vectors are counted by the model's own `get_image_features`; of several forms of an image the first that runs is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from tests.sweep.tiny import VOCAB

Batch = dict[str, Any]
TOKENS = {"image": VOCAB - 1, "video": VOCAB - 2, "audio": VOCAB - 3}
"""Ids that tiny batches do not draw; `tiny.builders` puts them into the configs."""
SIDE, PATCH, FRAMES = 64, 16, 2


PLACES = "places"
"""How many tokens a form of an input needs, where the model does not say."""


def normal(*shape: int) -> torch.Tensor:
    """The same on every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(8))


def modal_changes(model: Any, batch: Batch) -> dict[tuple[str, str], Batch]:
    """(argument, "") -> what is given beside the text of `batch`, which grows by the places of the vectors."""
    changes: dict[tuple[str, str], Batch] = {}
    takes = inspect.signature(model.forward).parameters
    for modality, forms in (("image", _images), ("video", _videos), ("audio", _sounds)):
        for form in forms(model, len(batch["input_ids"])):
            given = {name: value for name, value in form.items() if name in takes}
            change = _running(model, batch, modality, given, form.get(PLACES)) if given else None
            if change is None:
                continue
            changes |= {(name, ""): change for name in given if (name, "") not in changes}
            changes |= _features(model, batch, modality, change)
            if "pixel_values_images" in takes and modality == "image":
                older = {k: v for k, v in change.items() if k != "pixel_values"}
                changes["pixel_values_images", ""] = older | {"pixel_values_images": change["pixel_values"]}
            for name, value in CHOICES.items():
                changes.setdefault((name, ""), change | {name: getattr(model.config, name, value)})
            if "image_patches" not in takes:  # Fuyu takes two forms
                break
    return changes


CHOICES: dict[str, Any] = {
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
    "vision_aspect_ratio": "anyres_max_9",
}
"""Of the parts that look at images, as the config has them: others give another number of vectors."""


def _running(model: Any, batch: Batch, modality: str, given: Batch, places: int | None) -> Batch | None:
    """The change of a batch with which the plain model runs, if there is one."""
    counts = [places] if places else [_vectors(model, modality, given), 0, *range(1, 26), 32, 64]
    for count in counts:
        change = given | (_with_places(batch, modality, count) if count else {})
        for tried in (change, change | _types(modality, change)):
            try:
                with torch.no_grad():
                    model(**{k: v for k, v in (batch | tried).items() if v is not None})
            except Exception:
                continue
            return tried
        if counts[0] > 0 and count:
            return None
    return None


def _types(modality: str, change: Batch) -> Batch:
    """Which tokens stand for an image or a video, for classes that ask for it beside a grid."""
    ids = change.get("input_ids")
    number = {"image": 1, "video": 2}.get(modality)
    return {} if ids is None or number is None else {"mm_token_type_ids": number * (ids == TOKENS[modality]).int()}


def _with_places(batch: Batch, modality: str, count: int) -> Batch:
    """Tokens of a modality after the text, `count` in all."""
    ids = batch["input_ids"]
    places = ids.new_full((len(ids), count // len(ids)), TOKENS[modality])
    longer = torch.cat([ids, places], dim=1)
    change: Batch = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    labels = batch.get("labels")
    if labels is not None and labels.shape == ids.shape:
        change["labels"] = torch.cat([labels, torch.full_like(places, -100)], dim=1)
    return change


def _encoded(model: Any, modality: str, given: Batch) -> Any:
    encode = getattr(model, f"get_{modality}_features", None)
    if encode is None:
        encode = getattr(getattr(model, "model", None), f"get_{modality}_features", None)
    if encode is None:
        return None
    takes = inspect.signature(encode).parameters
    named = {n: v for n, v in given.items() if n in takes or n.startswith("input_features")}
    try:
        with torch.no_grad():
            return encode(**named)
    except Exception:
        return None


def _pooled(encoded: Any) -> Any:
    if isinstance(encoded, torch.Tensor | list | tuple):
        return encoded
    pooled = getattr(encoded, "pooler_output", None)
    return getattr(encoded, "last_hidden_state", None) if pooled is None else pooled  # Fuyu has no other


def _vectors(model: Any, modality: str, given: Batch) -> int:
    """How many the parts of the model make of an input; 0 if they do not say."""
    pooled = _pooled(_encoded(model, modality, given))
    if isinstance(pooled, torch.Tensor):
        return pooled.numel() // pooled.shape[-1]
    return sum(len(part.reshape(-1, part.shape[-1])) for part in pooled) if isinstance(pooled, list | tuple) else 0


def _features(model: Any, batch: Batch, modality: str, change: Batch) -> dict[tuple[str, str], Batch]:
    """Vectors that were made before, instead of the input."""
    pooled = _pooled(_encoded(model, modality, change))
    if pooled is None:
        return {}
    drawn = torch.randn_like(pooled) if isinstance(pooled, torch.Tensor) else [torch.randn_like(p) for p in pooled]
    text = {k: v for k, v in change.items() if k in ("input_ids", "attention_mask", "labels")}
    ready = {modality: BaseModelOutputWithPooling(last_hidden_state=drawn, pooler_output=drawn)}  # type: ignore[arg-type]  # HF's are lists too
    return {
        ("mm_encoder_outputs", modality): text | {"mm_encoder_outputs": ready},
        ("image_hidden_states", modality): text | {"image_hidden_states": drawn},
    }


def _part(config: Any, name: str, field: str, default: Any) -> Any:
    """A field of a part's config."""
    value = getattr(getattr(config, name, None), field, None)
    value = getattr(config, field, None) if value is None else value
    return default if value is None else value


def _images(model: Any, rows: int) -> Iterator[Batch]:
    config = model.config
    side = _part(config, "vision_config", "image_size", SIDE)
    side = side[0] if isinstance(side, list | tuple) else side
    pixels, sizes = normal(rows, 3, side, side), torch.full((rows, 2), side)
    tiles = pixels[:, None].repeat(1, 2, 1, 1, 1)
    if "batch_num_images" in inspect.signature(model.forward).parameters:
        yield {"pixel_values": tiles, "image_sizes": sizes, "batch_num_images": torch.ones(rows, dtype=torch.long)}
    seen = torch.ones(rows, 1, side, side, dtype=torch.long)
    yield {"pixel_values": pixels[:, None], "pixel_attention_mask": seen}
    yield {"pixel_values": pixels}
    if "mim_labels" in inspect.signature(model.forward).parameters:
        yield _masked_images(rows, pixels, _part(config, "image_config", "patch_size", PATCH))
    if "image_pixel_values" in inspect.signature(model.forward).parameters:
        yield _image_and_crop(rows, tiles, config.vision_config)
    if isinstance(getattr(config, "input_size", None), int):
        yield {"pixel_values": normal(rows, 3, config.input_size, config.input_size)}
    yield {"pixel_values": pixels, "image_sizes": sizes}
    yield {"pixel_values": pixels, "image_sizes": sizes.tolist()}
    yield {"pixel_values": tiles, "image_sizes": sizes}
    patch = _part(config, "vision_config", "patch_size", PATCH)
    patch = patch if isinstance(patch, int) else PATCH
    frames = _part(config, "vision_config", "temporal_patch_size", 1)
    grid = torch.tensor([[1, 4, 4]] * rows)
    yield {"pixel_values": normal(rows * 16, 3 * frames * patch * patch), "image_grid_thw": grid}
    yield {"pixel_values": normal(rows * 16, 3 * patch * patch)}
    yield {"image_patches": normal(rows, 4, 3 * patch * patch)}
    places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), dim=-1).reshape(1, 36, 2)
    yield {"pixel_values": torch.rand(rows, 36, 3 * patch * patch), "image_position_ids": places.repeat(rows, 1, 1)}
    yield {
        "pixel_values": normal(rows, 1, 4, 3, side, side),
        "aspect_ratio_mask": torch.ones(rows, 1, 4, dtype=torch.long),
        "aspect_ratio_ids": torch.full((rows, 1), 6),
        "cross_attention_mask": torch.ones(rows, 12, 1, 4, dtype=torch.long),
    }
    yield {"pixel_values": normal(rows, frames, side, side, 3)}
    yield {"pixel_values": normal(rows, frames, patch, patch, 3)}


def _image_and_crop(rows: int, tiles: torch.Tensor, vision: Any) -> Batch:
    """Phi 4's: each side of n patches gives n/2 rows of n/2 vectors and one between them, and one is between the two."""
    patches = vision.image_size // vision.patch_size
    return {
        "image_pixel_values": tiles,
        "image_sizes": torch.full((rows, 2), vision.crop_size),
        "image_attention_mask": torch.ones(rows, 2, patches, patches, dtype=torch.long),
        PLACES: rows * (2 * (patches // 2) * (patches // 2 + 1) + 1),
    }


def _masked_images(rows: int, pixels: torch.Tensor, patch: int) -> Batch:
    """Beside a text of 12 tokens: Flava's, of which some patches and tokens are masked, and pairs that do not belong."""
    side = pixels.shape[-1] // patch
    masked = normal(rows, side, side) > 0
    return {
        "pixel_values": pixels,
        "image_attention_mask": torch.zeros(rows, 1, 1, side * side + 1),  # added as it is
        "bool_masked_pos": masked,
        "codebook_pixel_values": torch.rand(rows, 3, 8 * side, 8 * side, generator=torch.Generator().manual_seed(8)),
        "mim_labels": torch.arange(rows * side * side).reshape(rows, side, side),
        "mlm_labels": torch.arange(rows * 12).reshape(rows, 12) % 50,
        "itm_labels": torch.arange(rows) % 2,
        "input_ids_masked": torch.arange(rows * 12).reshape(rows, 12) % 50 + 1,
        "skip_unmasked_multimodal_encoder": False,
        "return_loss": True,
    }


def _videos(model: Any, rows: int) -> Iterator[Batch]:
    config = model.config
    side = _part(config, "vision_config", "image_size", SIDE)
    frames = normal(rows, FRAMES, 3, side, side)
    yield {"pixel_values_videos": frames, "image_sizes_videos": torch.full((rows, 2), side)}
    yield {"pixel_values_videos": normal(rows, 8, 3, side, side)}
    patch = _part(config, "vision_config", "patch_size", PATCH)
    patch = patch if isinstance(patch, int) else PATCH
    depth = _part(config, "vision_config", "temporal_patch_size", 1)
    grid = torch.tensor([[1, 4, 4]] * rows)
    yield {"pixel_values_videos": normal(rows * 16, 3 * depth * patch * patch), "video_grid_thw": grid}


def _sounds(model: Any, rows: int) -> Iterator[Batch]:
    config = model.config
    bins = _part(config, "audio_config", "num_mel_bins", 80)
    positions = _part(config, "audio_config", "max_source_positions", 64)
    for frames in (2 * positions, 48, 100, 200):
        mask = torch.ones(rows, frames, dtype=torch.long)
        for sounds in (normal(rows, bins, frames), normal(rows, frames, bins)):
            yield {"input_features": sounds}
            yield {"input_features": sounds, "input_features_mask": mask}
            yield {"input_features": sounds, "input_features_mask": mask.bool()}
            yield {"input_features": sounds, "feature_attention_mask": mask}
    frames = torch.randint(
        0, 16, (rows, 5, _part(config, "audio_config", "n_mel_bins", 80)), generator=torch.Generator()
    )
    yield {"audio_input_ids": frames, "audio_input_ids_mask": torch.ones(rows, 5, dtype=torch.long)}
    bins = _part(config, "audio_config", "input_size", 80)
    lengths = torch.full((rows,), 4)
    yield {"audio_input_features": normal(rows, 32, bins), "audio_embed_sizes": lengths,
           "audio_attention_mask": torch.ones(rows, 4, dtype=torch.bool), PLACES: 4 * rows}  # fmt: skip
    bins = _part(config, "encoder_config", "input_dim", 160)
    # Granite's: a window of 15 frames gives 3 vectors.
    yield {"input_features": normal(rows, 45, bins), "input_features_mask": torch.ones(rows, 9, dtype=torch.bool)}
    yield {"input_features": normal(rows, 45, bins)}
