"""Fields of a Hugging Face config, read so that no config raises.

transformers 5.23 has configs whose fields differ from layer to layer (Gemma 4's `head_dim`): reading such a field of the
whole config raises an error that is no AttributeError, so that `getattr` with a default does not help. A config with two
texts (MusicGen) has no `get_text_config()`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["field", "text_config", "values"]


def text_config(config: object) -> Any:
    """The text part of a model's config, the decoder's of two; `config` itself if there is no such part."""
    if not hasattr(config, "get_text_config"):
        return config
    try:
        return config.get_text_config()
    except ValueError:  # there are two
        return config.get_text_config(decoder=True)


def values(config: object, name: str) -> list[Any]:
    """A field's values: one, or that of each layer where they may differ; without None, so empty where there is none."""
    try:
        found = [getattr(config, name, None)]
    except Exception:
        layers: Any = getattr(config, "per_layer_config", None)
        if layers is None:
            raise
        found = [getattr(layers[i], name, None) for i in range(len(layers))]
    return [value for value in found if value is not None]


def field(config: object, name: str, default: object = None) -> Any:
    """A field, the first layer's where they differ, or `default`."""
    return next(iter(values(config, name)), default)
