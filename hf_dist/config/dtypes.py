"""Data types as people write them in JSON, by torch's names and their short forms."""

from __future__ import annotations

from hf_dist.config import accepts
from hf_dist.config.accepts import either
from hf_dist.config.values import BadValue, not_among

_DTYPE_SPELLINGS = {
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
    "bf16": "bf16",
    "bfp16": "bf16",  # as older versions of DeepSpeed spelled it
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "torch.float32": "fp32",
}


_DTYPES = ("fp16", "bf16", "fp32")


@accepts.taking(
    either({"enum": list(_DTYPES)}, {"type": "string", "pattern": accepts.any_case(*_DTYPE_SPELLINGS)}),
    "one of fp16, bf16, fp32",
)
def dtype(value: object) -> str:
    """ "fp16", "bf16" or "fp32" from any usual spelling."""
    text = str(value).strip().lower()
    if text in _DTYPE_SPELLINGS:
        return _DTYPE_SPELLINGS[text]
    raise not_among(value, _DTYPES, tuple(_DTYPE_SPELLINGS))


@accepts.taking(
    either(
        {"enum": ["bfloat16"]},
        {
            "type": "string",
            "pattern": accepts.any_case(*(name for name, kind in _DTYPE_SPELLINGS.items() if kind == "bf16")),
        },
    ),
    '"bfloat16"',
)
def autocast_dtype(value: object) -> str:
    """ "bf16" from any usual spelling."""
    found = dtype(str(value).strip().removeprefix("torch."))
    if found != "bf16":
        raise BadValue("is not available: only in bfloat16 does autocast need no loss scale", 'Set it to "bfloat16".')
    return found
