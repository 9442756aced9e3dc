"""`from_pretrained` without reading weights: parameters stay in their files until they are sharded or read.

HF's own loader runs unchanged on tensors that record the operations applied to them (`checkpoint/recording.py`). Renames,
weight conversions, dtype policy, tied weights, missing, unexpected and mismatched keys are therefore HF's. Afterwards each
"loaded" parameter becomes lazy (`sharding/lazy.py`). Buffers are read at once; HF initialises new heads.
Source of the hook: transformers/modeling_utils.py, `PreTrainedModel._load_pretrained_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from hf_dist.checkpoint.recording import RecordedTensor, read_whole, recorded
from hf_dist.checkpoint.safetensors_source import SafetensorsFile
from hf_dist.engine.ddp_compat import give_ddp_whole_weights
from hf_dist.hf.dequantise import dequantised_as_read, dequantises
from hf_dist.hf.stock_hook import StockHook
from hf_dist.log import say_once
from hf_dist.sharding.lazy import LazyWeight

__all__ = ["from_pretrained", "stream_while_alive", "streaming"]


def from_pretrained(model_class: Any, *args: object, **kwargs: object) -> Any:
    """`model_class.from_pretrained(*args, **kwargs)`, with weights that are read only when the model is prepared.

    `model_class`: any class with HF's `from_pretrained` (an `AutoModel...`, a model class). Local. At `prepare` each rank reads
    only its part. A parameter that is read or changed earlier is loaded in full on this rank. The result equals the stock one
    in every parameter, buffer and message. Loaded in full, with one line that gives the reason: models that stay quantized,
    `device_map`, `.bin` and GGUF files, `state_dict=`.
    """
    with streaming():
        return model_class.from_pretrained(*args, **kwargs)


@contextmanager
def streaming() -> Iterator[None]:
    """Inside, every `from_pretrained` of this process streams its weights."""
    _begin(_HOOK.begin)
    try:
        yield
    finally:
        _HOOK.end()


def stream_while_alive(owner: object) -> None:
    """Make every `from_pretrained` of this process stream until `owner` (training arguments) is garbage-collected."""
    _begin(lambda: _HOOK.while_alive(owner))


def _begin(begin: Callable[[], None]) -> None:
    give_ddp_whole_weights()
    begin()


def _load(
    model: PreTrainedModel,
    state_dict: object,
    checkpoint_files: object,
    load_config: object,
    expected_keys: object = None,
) -> object:
    """Stands in for `PreTrainedModel._load_pretrained_model`; same arguments and result."""
    stock = _HOOK.stock
    arguments: tuple[object, ...] = (model, state_dict, checkpoint_files, load_config)
    if expected_keys is not None:  # transformers before 5.4 has no such argument
        arguments = (*arguments, expected_keys)
    if _HOOK.users == 0:
        return stock(*arguments)
    reason = _reason_not_to_stream(model, state_dict, checkpoint_files, load_config, expected_keys)
    if reason is None:
        try:
            result = _load_recorded(stock, model, checkpoint_files, load_config)
            if result is not None:
                return result
            reason = "a weight conversion failed"
        except Exception as error:  # whatever the error, the ordinary load does no worse than without hf_dist
            reason = f"{type(error).__name__}: {error}"
    if expected_keys is None:
        say_once(
            f"{type(model).__name__} is not streamed from its files but loaded in full on every rank ({reason}); it is "
            "sharded later, when it is prepared"
        )
    return stock(*arguments)


def _reason_not_to_stream(
    model: PreTrainedModel, state_dict: object, checkpoint_files: Any, load_config: Any, expected_keys: object
) -> str | None:
    if load_config.hf_quantizer is not None and not dequantises(load_config.hf_quantizer):
        return "it is quantized"
    if load_config.device_map is not None:
        return "device_map is given"
    if state_dict is not None:
        return "state_dict is given"
    if not checkpoint_files or not all(str(f).endswith(".safetensors") for f in checkpoint_files):
        return "its files are not safetensors"
    if getattr(load_config, "device_mesh", None) is not None or getattr(model, "_pp_stage", None) is not None:
        return "it is distributed by transformers"
    if expected_keys is not None or is_deepspeed_zero3_enabled():
        return "it is not a whole model"
    return None


def _load_recorded(stock: Any, model: PreTrainedModel, checkpoint_files: Any, load_config: object) -> object:
    """The stock loader's result, or None when it reported an error and the model must be loaded again."""
    stored: object = recorded(t for f in checkpoint_files for t in SafetensorsFile(f).tensors().values())
    with dequantised_as_read():
        result = stock(model, stored, checkpoint_files, load_config)
    if result[0].conversion_errors or result[0].error_msgs:
        return None
    for path, module in model.named_modules():
        _adopt(path, module)
    return result


def _adopt(path: str, module: nn.Module) -> None:
    """Replace the parameters that the loader put into `module` by lazy ones, and read the buffers."""
    for name, p in module._parameters.items():
        if isinstance(p, RecordedTensor):
            full_name = f"{path}.{name}" if path else name
            lazy = LazyWeight(p.source, full_name).parameter(requires_grad=p.requires_grad)
            lazy._is_hf_initialized = True  # otherwise HF would initialise it
            module._parameters[name] = lazy
    for name, buffer in module._buffers.items():
        if isinstance(buffer, RecordedTensor):
            value = read_whole(buffer)
            value._is_hf_initialized = True  # type: ignore[attr-defined]
            module._buffers[name] = value


_HOOK = StockHook(PreTrainedModel, "_load_pretrained_model", _load, staticmethod)
