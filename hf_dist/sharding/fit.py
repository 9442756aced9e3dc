"""Parameters that cannot be moved into flat buffers without becoming something else: refused by name before anything is."""

from __future__ import annotations

import itertools

from torch import nn

from hf_dist.errors import ModelError
from hf_dist.sharding.guard import LAZY
from hf_dist.sharding.tied_views import bytes_of, same_elements

__all__ = ["check_fit"]


def check_fit(model: nn.Module, data_ranks: int = 1) -> None:
    """Raise `ModelError` for a parameter without memory, a complex one, and two that share memory. Local; reads no elements.

    With several `data_ranks` also for an embedding that forward renormalises: each rank would do so for the rows that it reads.

    A flat buffer has real elements. It gives each parameter a place of its own, so two that share a part of their memory would
    be trained apart. One parameter under two names stays one; two with all elements in common are kept equal (`tied_views.py`).
    """
    meta = [n for n, p in model.named_parameters() if p.is_meta]
    if meta:
        raise ModelError(
            f"{len(meta)} parameters have no memory (device 'meta'), the first is {meta[0]}. Load the weights first, for "
            "example with from_pretrained(...) without device_map, or call model.to_empty(device=...) and initialise."
        )
    for name, module in model.named_modules() if data_ranks > 1 else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ModelError(
                f"{name}: max_norm={module.max_norm} writes the rows that a forward looks up. Ranks look up different rows, so "
                "their weights would drift apart. Leave max_norm out and clamp the norms after optimizer.step()."
            )
    places: list[tuple[int, int, int, str]] = []
    params = dict(model.named_parameters())
    for name, param in model.named_parameters():
        if param.is_complex():
            raise ModelError(
                f"{name} is complex ({param.dtype}): buffers of weights are real, so its imaginary part would be lost. Make it "
                "a real parameter with a last dimension of 2, and view it with torch.view_as_complex in forward."
            )
        here = not hasattr(param, LAZY) and param.untyped_storage().data_ptr()
        if here and param.numel():
            places.append((*bytes_of(param), name))
    places.sort()
    for (storage, _, end, name), (other_storage, start, _, other) in itertools.pairwise(places):
        if storage != other_storage or start >= end:
            continue
        kept_equal = same_elements(params[name], params[other]) is not None
        # A frozen one would not follow the steps of the other.
        if not kept_equal or params[name].requires_grad != params[other].requires_grad:
            raise ModelError(
                f"{name} and {other} are two parameters in the same memory: one is a part or a frozen view of the other, and a "
                "change of one changes both. Each gets a place of its own when the model is prepared, so they would be trained "
                "apart. Make them one parameter (a.weight = b.weight), or give one a copy (.clone())."
            )
