"""Checks with a few tokens, before training, that a split model computes the same as the model.

Two forwards of the same tokens, whole and split, must give the same outputs, all of them, and loss. Both compute in fp32, also
with weights in half precision, whose rounding would hide a model that mixes little; an attention kernel that has no fp32 is
replaced meanwhile, and compared afterwards in the precision of the weights (`_IN_FP32`). The same with each optional
argument that the forward takes and that can be made here; an argument with which the model is another one on parts, or that
was not tried, is refused when it comes (`SplitSequence.refused`, `verified`). Code that mixes the sequence outside of
attention (recurrences, convolutions, locally counted positions) shows at the borders of the parts. The error then names the
first module whose output depends on other positions while attention is silent. Effects beyond these few tokens are not
seen; models with such effects are known by their config (`split.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_dist.dist import collectives
from hf_dist.errors import HfDistError, ModelError
from hf_dist.model_config import text_config
from hf_dist.parallel.sequence.attention import packing_seen
from hf_dist.parallel.sequence.forward import silenced
from hf_dist.parallel.sequence.inputs import IGNORED
from hf_dist.parallel.sequence.split import SplitSequence
from hf_dist.tensors import pytree
from hf_dist.tensors.full_precision import FullPrecision

Evaluate = Callable[[object, Callable[[nn.Module, object], object]], Any]
"""`evaluate(batch, function)`: runs `function(model, batch)` without gradient; returns its result on every rank."""

_TOKENS_PER_RANK = 16
_TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-6}
_IN_FP32 = ("sdpa", "eager")
"""Attention of torch's operators. flash_attn takes half precision only, flex attention is compiled."""
_HALF = 5e-2
"""Between kernels in half precision: sums in another order differ, and a router may choose another expert."""
_TINY = 1e-12
_MAIN = ("values", "logits", "loss")
"""Outputs without which a model is not split; others that differ are refused when they are read (`SplitSequence.parts`)."""
_SAME = 1e-6
"""The same rows in the same kernels: unmixed outputs are equal to the bit in any precision."""


def verify(split: SplitSequence, model: nn.Module, evaluate: Evaluate, *, tries: bool = True) -> None:
    """Compare, and find whether the model's loss is a mean over its labels. Collective over world.

    `tries`: also with optional arguments. Stages of a pipeline run with the arguments that they were cut with.
    Raises `ModelError` on every rank if the outputs differ.
    """
    was_training = model.training
    model.eval()
    batch = _tokens(split, model)
    try:
        if split.kernel in _IN_FP32:
            with FullPrecision():
                _verify_model(split, model, evaluate, batch, tries=tries)
            return
        has_eager = hasattr(sys.modules[type(split.model).__module__], "eager_attention_forward")
        with FullPrecision(), split.attending_by("eager" if has_eager else "sdpa"):
            _verify_model(split, model, evaluate, batch, tries=tries)
        split.knows_packing = _knows_packing(split, evaluate, batch)
        _verify_kernel(split, evaluate, batch)
    finally:
        model.train(was_training)


def _verify_kernel(split: SplitSequence, evaluate: Evaluate, batch: dict[str, torch.Tensor]) -> None:
    """Compare with the attention kernel that training uses."""
    try:
        problems = _agreed(split, _differences(_whole(split, evaluate, batch), evaluate(batch, _read)))
    except HfDistError:
        raise
    except Exception as error:  # whatever the kernel does not take
        raise _refusal(split, f"{type(error).__name__}: {error}") from error
    if (problem := next((problems[name] for name in _MAIN if name in problems), None)) is not None:
        raise _refusal(split, f"with {split.kernel}, {problem}")


def _verify_model(
    split: SplitSequence, model: nn.Module, evaluate: Evaluate, batch: dict[str, torch.Tensor], *, tries: bool
) -> None:
    try:
        mixing = _mixing(split, evaluate, batch)
    except HfDistError:
        raise
    except Exception as error:  # rows of another kind than text (multiple choice)
        raise _refusal(split, f"it cannot be tried with rows of tokens ({type(error).__name__}: {error})") from error
    if mixing is not None:
        where = _first_mixing(split, model, evaluate, mixing)
        raise _refusal(split, f"positions depend on each other outside of attention{where}")
    expected = _whole(split, evaluate, batch)
    split.knows_packing = _knows_packing(split, evaluate, batch)
    try:
        if split.arguments.counts_mask and not _counts_mask(split, evaluate, batch):
            split.arguments = replace(split.arguments, counts_mask=False)
        if "labels" in batch:
            # A label for each token, because a mean over no labels is not a number.
            every = {**batch, "labels": batch["input_ids"]}
            count = torch.tensor(every["labels"].numel(), device=every["labels"].device)
            once, half = (evaluate({**every, "num_items_in_batch": n * count}, _read)["loss"] for n in (1, 2))
            if torch.isclose(once, half, rtol=1e-3):  # a custom loss: it does not accept shifted labels either
                split.is_mean, split.arguments = True, replace(split.arguments, shifts=False)
        problems = _agreed(split, _differences(expected, evaluate(batch, _read)))
        if problems.keys().isdisjoint(_MAIN):
            split.parts = {name.partition(".")[0]: problem for name, problem in problems.items()}
            if tries:
                _try_arguments(split, model, evaluate, batch)
    except HfDistError:
        raise
    except Exception as error:  # whatever a model's own code raises for half of its usual input
        raise _refusal(split, f"{type(error).__name__}: {error}") from error
    if (problem := next((problems[name] for name in _MAIN if name in problems), None)) is not None:
        raise _refusal(split, problem)


def _refusal(split: SplitSequence, problem: str) -> ModelError:
    attends = "" if split.num_calls else "; none of its layers attends through HF's interface"
    return ModelError(
        f"sequence_parallel_size: {type(split.model).__name__} is another model on parts of a sequence: {problem}{attends}. It "
        "cannot be split over ranks; remove the key."
    )


def _tokens(split: SplitSequence, model: nn.Module) -> dict[str, torch.Tensor]:
    """Two rows of tokens. The first few have no labels, so that ranks have different counts of labels."""
    config: object = split.model.config
    text = text_config(config)
    multiple = split.axes.layout.multiple
    most = int(getattr(text, "max_position_embeddings", None) or _TOKENS_PER_RANK * multiple)
    length = min(_TOKENS_PER_RANK, max(1, (most - 2) // multiple)) * multiple  # RoBERTa's positions begin at 2
    draw = torch.Generator().manual_seed(0)
    low = min(1 + int(getattr(text, "pad_token_id", None) or 0), text.vocab_size // 2)
    ids = torch.randint(low, text.vocab_size, (2, length), generator=draw)
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    batch = {"input_ids": ids.to(device)}
    if "labels" in split.arguments.names and not split.at_once:
        labels = batch["input_ids"].clone()
        labels[:, : length // 3] = IGNORED
        batch["labels"] = labels
    return batch


def _knows_packing(split: SplitSequence, evaluate: Evaluate, batch: dict[str, torch.Tensor]) -> bool:
    """Whether HF's masks of this model separate documents that begin at position 0."""
    if split.is_pair or not split.arguments.takes("position_ids"):
        return False
    ids = batch["input_ids"]
    start = ids.shape[1] // 2 - 1  # not at the border of a chunk
    positions = torch.cat([torch.arange(start), torch.arange(ids.shape[1] - start)])
    packed = {"input_ids": ids, "position_ids": positions.expand(ids.shape[0], -1).to(ids.device)}
    if split.arguments.caches:
        packed["use_cache"] = False  # type: ignore[assignment]
    with packing_seen(start, ids.device) as seen:
        _whole(split, evaluate, packed)
    if any(seen) and not all(seen):
        raise ModelError(
            f"sequence_parallel_size: {type(split.model).__name__} keeps packed documents apart in some of its masks only, "
            "which cannot be followed on parts of a sequence. Remove the key."
        )
    return bool(seen) and all(seen)


def _counts_mask(split: SplitSequence, evaluate: Evaluate, batch: dict[str, torch.Tensor]) -> bool:
    """Whether padding has positions of its own: OPT counts from the mask. BioGPT could, but gives its embedding positions."""
    if not split.arguments.takes("position_ids"):
        return True
    ids = batch["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, -ids.shape[1] // 2 :] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    a, b = (_whole(split, evaluate, {**given, **more})["values"] for more in ({}, {"position_ids": places}))
    return bool((a != b).any())


def _whole(
    split: SplitSequence, evaluate: Evaluate, batch: dict[str, torch.Tensor], read: Callable[..., object] | None = None
) -> dict[str, torch.Tensor]:
    """A forward that is not split. Each row appears twice, because pipeline stages tell batches apart by shape."""
    rows = next(x.shape[0] for x in batch.values() if isinstance(x, torch.Tensor))
    twice = {key: x.repeat(2, *[1] * (x.dim() - 1)) if isinstance(x, torch.Tensor) else x for key, x in batch.items()}
    with split.off():
        found = evaluate(twice, read or _read)
    return {name: x[: len(x) // 2] if x.dim() and len(x) % (2 * rows) == 0 else x for name, x in found.items()}


def _read(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Every tensor that the model returns, by name; "loss", and "values": the logits, or what there is instead."""
    output = model(**batch)
    named = dict(output) if isinstance(output, dict) else {str(i): x for i, x in enumerate(output)}
    found: dict[str, torch.Tensor] = {}
    for name, value in named.items():
        for number, x in enumerate(pytree.leaves(value)):
            if isinstance(x, torch.Tensor) and (x.is_floating_point() or name == "loss"):
                found[name if x is value else f"{name}.{number}"] = x.detach().to(x.dtype, copy=True)
    values = found.get("logits") if isinstance(output, dict) else found[str(len(named) - 1)]
    if values is None:
        values = next(x for name, x in found.items() if x.dim() > 1)
    loss = found.get("loss", torch.zeros((), device=values.device))
    return {**found, "values": values, "loss": loss}


def _differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> dict[str, str]:
    """In words, what differs, by output."""
    tolerance = _TOLERANCE.get(expected["values"].dtype, _HALF)
    problems = {}
    for name, wanted in expected.items():
        title = {"values": "its outputs differ", "loss": "its loss differs"}.get(name, f"its {name} differs")
        if name not in found:
            problems[name] = f"{title}: there is none"
            continue
        a, b = found[name].double(), wanted.double()
        if a.shape != b.shape:
            problems[name] = f"{title} in shape ({tuple(a.shape)}, not {tuple(b.shape)})"
            continue
        error = float((a - b).norm() / b.norm().clamp(min=_TINY))
        if not error < tolerance:
            problems[name] = f"{title} by {error:.1e} of their size"
    return problems


def _agreed(split: SplitSequence, problems: dict[str, str]) -> dict[str, str]:
    """Those of all ranks that share a sequence: the first token's output is right where that token is. Collective over cp."""
    everyone = collectives.all_gather_object(split.axes.cp, problems)
    return {name: text for own in reversed(everyone) for name, text in own.items()}


# ---- optional arguments

_KNOWN = frozenset(
    {"input_ids", "attention_mask", "position_ids", "labels", "shift_labels", "num_items_in_batch", "logits_to_keep"}
    | {"decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "cache_position"}
    | {"cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"}  # of packed rows: whole on every rank; by token
)
"""Compared in every check, or cut in one way that does not depend on the model."""
_FLAGS = frozenset({"output_hidden_states"})
"""What HF's models take among `**kwargs`, too."""


def _try_arguments(split: SplitSequence, model: nn.Module, evaluate: Evaluate, batch: dict[str, torch.Tensor]) -> None:
    """Find with which optional arguments the model is the same on parts. Collective over world."""
    verified = set(_KNOWN)
    for name, change in _changes(split, model, batch).items():
        takes = split.arguments.takes if name in _FLAGS else split.arguments.names.__contains__
        if not takes(name):
            continue
        tried = {key: value for key, value in {**batch, **change}.items() if value is not None}
        try:
            expected = _whole(split, evaluate, tried)
        except Exception:  # a value that this model, or another axis, has another idea of: not verified
            continue
        try:
            differ = _differences(expected, evaluate(tried, _read))
        except Exception as error:  # whatever a model's own code, or ours, raises for half of its usual input
            differ = {"": f"{type(error).__name__}: {error}"}
        differ = _agreed(split, differ)
        problem = next((text for key, text in differ.items() if key.partition(".")[0] not in split.parts), None)
        if problem is None:
            verified.add(name)
        else:
            split.refused[name] = problem
    split.verified = frozenset(verified)


def _changes(split: SplitSequence, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Name of an argument -> what is given then, instead or beside; None takes away."""
    ids = batch["input_ids"]
    rows, length = ids.shape
    config: object = split.model.config
    text = text_config(config)
    width = next((getattr(text, n) for n in ("hidden_size", "d_model", "n_embd", "dim") if hasattr(text, n)), 0)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    draw = torch.Generator().manual_seed(1)
    embeds = (0.05 * torch.randn(rows, length, max(width, 1), generator=draw)).to(ids.device, dtype)
    second = torch.zeros_like(ids)
    second[:, length // 3 :] = 1
    later = torch.arange(length, device=ids.device)[None].expand(rows, -1)
    return {
        "token_type_ids": {"token_type_ids": second},
        "inputs_embeds": {"input_ids": None, "inputs_embeds": embeds},
        "position_ids": {"position_ids": later},
        "output_hidden_states": {"output_hidden_states": True},
    }


def _mixing(
    split: SplitSequence, evaluate: Evaluate, batch: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], ...] | None:
    """Two batches that differ in one token, if other positions see the difference while attention is silent; else None."""
    first = {"input_ids": batch["input_ids"]}
    ids = first["input_ids"].clone()
    at = ids.shape[1] // 2
    ids[:, at] = torch.where(ids[:, at] > ids.min(), ids[:, at] - 1, ids[:, at] + 1)
    second = {"input_ids": ids}
    if split.is_pair:
        first["decoder_input_ids"], second["decoder_input_ids"] = first["input_ids"], ids
    with silenced():
        a, b = (_whole(split, evaluate, each).get("values") for each in (first, second))
        if (
            a is None or a.dim() < 3 or a.shape[1] != ids.shape[1]
        ):  # a head over whole rows may read the one token that is the same
            a, b = (_whole(split, evaluate, each, _read_tokens).get("values") for each in (first, second))
    if a is None or b is None:
        return None
    return (first, second) if _differs(a, b, torch.arange(ids.shape[1], device=a.device) != at) else None


def _first_mixing(split: SplitSequence, model: nn.Module, evaluate: Evaluate, batches: Any) -> str:
    """The name of the first module whose output differs; empty if this rank has none."""
    length = batches[0]["input_ids"].shape[1]
    seen: list[dict[str, torch.Tensor]] = []
    for tokens in batches:
        with silenced(), _kept(model, length) as outputs:
            _whole(split, evaluate, tokens)
        seen.append(outputs)
    others = (batches[0]["input_ids"] == batches[1]["input_ids"])[0]
    mixing = [name for name in seen[0] if name in seen[1] and _differs(seen[0][name], seen[1][name], others)]
    leaves = [name for name in mixing if not any(other.startswith(f"{name}.") for other in mixing)]
    return f" ({leaves[0]})" if leaves else ""


def _read_tokens(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the last module gives that has an output for each token."""
    with _kept(model, batch["input_ids"].shape[1]) as outputs:
        model(**batch)
    return {"values": list(outputs.values())[-1]} if outputs else {}


@contextmanager
def _kept(model: nn.Module, length: int) -> Iterator[dict[str, torch.Tensor]]:
    """Outputs of (rows, `length`, width) of the modules that are called inside, by name, in the order of their calls."""
    outputs: dict[str, torch.Tensor] = {}
    hooks = [m.register_forward_hook(_keeping(outputs, n, length)) for n, m in model.named_modules() if n]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _keeping(outputs: dict[str, torch.Tensor], name: str, length: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.dim() == 3 and first.shape[1] == length:
            outputs.pop(name, None)  # the last of several calls, at its place
            outputs[name] = first.detach().clone()

    return hook


def _differs(a: torch.Tensor, b: torch.Tensor, others: torch.Tensor) -> bool:
    a, b = a[:, others].float(), b[:, others].float()
    return float((a - b).norm()) > _SAME * float(b.norm().clamp(min=_TINY))
