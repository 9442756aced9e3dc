"""The ranks of a pipeline read the same batches: compared before a stage sends tensors of sizes that follow from them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

import torch

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.errors import ModelError
from hf_dist.parallel.pipeline.probe import in_words
from hf_dist.tensors import pytree
from hf_dist.tensors.checksum import batch_digest

__all__ = ["compare_batches"]

Form = dict[str, str]
"""Name of an entry of a batch -> its shape and dtype, in words."""


def compare_batches(axis: MeshAxis, microbatches: Sequence[object]) -> None:
    """Raise `ModelError` on every rank of the pipeline unless all have the same microbatches: names, shapes, dtypes, elements.

    With other sizes a stage would wait for other tensors than the one before it sends: gloo ends the process for that, and NCCL
    waits. Collective over `axis`; sends 16 bytes. On a GPU the host waits for the digest.
    """
    forms = [_form_of(microbatch) for microbatch in microbatches]
    elements = struct.pack("<d", batch_digest(microbatches).item())
    rows = collectives.gather_rows(axis, hashlib.sha256(repr(forms).encode()).digest()[:8] + elements)
    if len(set(rows)) == 1:
        return
    everyone = collectives.all_gather_object(axis, forms)
    if all(theirs == everyone[0] for theirs in everyone):
        other = next(rank for rank, row in enumerate(rows) if row != rows[0])
        raise ModelError(
            f"the rank of pipeline stage {other} reads other data than that of stage 0: every rank of a pipeline needs the "
            "same batches in the same order. Use one seed on all ranks, and a sampler or collator that draws from torch, numpy "
            "or Python generators only."
        )
    other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    raise ModelError(
        f"the rank of pipeline stage {other} reads batches of another form than that of stage 0: "
        f"{_difference(everyone[0], everyone[other])}. Every rank of a pipeline needs the same batches in the same order: use "
        "one data set and one collator on all ranks."
    )


def _form_of(microbatch: object) -> Form:
    if isinstance(microbatch, Mapping):
        return {str(name): _words(value) for name, value in microbatch.items()}
    return {f"entry {number}": _words(value) for number, value in enumerate(pytree.leaves(microbatch))}


def _words(value: object) -> str:
    found = [in_words(tuple(x.shape), x.dtype) for x in pytree.leaves(value) if isinstance(x, torch.Tensor)]
    return ", ".join(found) or type(value).__name__


def _difference(first: list[Form], other: list[Form]) -> str:
    if len(first) != len(other):
        return f"{len(other)} microbatches, not {len(first)}"
    number, (here, there) = next(
        (n, both) for n, both in enumerate(zip(first, other, strict=True)) if both[0] != both[1]
    )
    which = f" in microbatch {number}" if len(first) > 1 else ""
    for name in {**here, **there}:
        if name not in there:
            return f"no {name}{which}"
        if name not in here:
            return f"{name} of {there[name]}{which}, which stage 0 has not"
        if here[name] != there[name]:
            return f"{name} is {there[name]}{which}, not {here[name]}"
    return f"its entries{which} are in the order {', '.join(there)}, not {', '.join(here)}"
