"""Wire codecs, one a file, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping

from hf_dist.tensors.codecs.codec import Codec
from hf_dist.tensors.codecs.float8 import Float8, Float8Products
from hf_dist.tensors.codecs.integers import Int4, Int8
from hf_dist.tensors.codecs.signs import Signs

__all__ = ["CODECS", "Codec", "Float8Products", "Signs", "codec_of"]

CODECS: Mapping[str, type[Codec]] = {kind.name: kind for kind in (Int8, Int4, Float8, Float8Products, Signs)}
"""Name in the config -> codec. A new codec is a file and a name here."""


def codec_of(name: str | None, block: int) -> Codec | None:
    """The codec of that name; None for "whole" or None: numbers are sent as they are."""
    return None if name in (None, "whole") else CODECS[name](block)
