"""A role with a frozen model: it loads the model in its own layout and answers outputs, log-probabilities and the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dist.config import BatchSizes, DistConfig, resolve_without_trainer
from hf_dist.dist import collectives
from hf_dist.dist.link import Message
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.dist.roles import Place
from hf_dist.engine.build import build_engine, mesh_for
from hf_dist.engine.engine import Engine
from hf_dist.engine.pipeline_runner import Example
from hf_dist.errors import ModelError
from hf_dist.hf.loading import from_pretrained
from hf_dist.hf.model_class import architecture_of, model_class, model_config
from hf_dist.remote.serving import Call, Calls, serve
from hf_dist.sharding.full_params import gathered

__all__ = ["serve_model"]


def serve_model(place: Place, folder: str, config: DistConfig) -> int:
    """Serve the model of `folder` in the layout `config` until the trainer has ended. Every rank of the role calls it.

    Returns how many calls were answered.
    """
    name = architecture_of(model_config(folder)) or "AutoModelForCausalLM"
    model = from_pretrained(model_class(name), folder)
    model.config.use_cache = False  # no answer has one
    mesh = mesh_for(config, model=model)
    config = resolve_without_trainer(config, data_ranks=mesh.data.size, on_gpu=mesh.device.type == "cuda")
    return serve(place, mesh, _Served(model, config, mesh).calls)


class _Served:
    def __init__(self, model: nn.Module, config: DistConfig, mesh: ParallelMesh) -> None:
        self._model: Any = model
        self._config, self._mesh = config, mesh
        self._built: Engine | None = None

    @property
    def calls(self) -> Calls:
        """What the role answers. Every rank of the role makes each call."""
        return {"forward": self.forward, "hidden": self.hidden, "log_probs": self.log_probs, "head": self.head}

    def _engine(self, inputs: Mapping[str, Tensor]) -> Engine:
        """The model's engine; the first call makes it, because its inputs are the example for pipeline stages."""
        if self._built is None:
            batch = BatchSizes(None, None, 1, self._mesh.data.size)
            example = Example(lambda: dict(inputs))
            self._built = build_engine(self._model, self._config, self._mesh, batch, trainable=False, example=example)
            self._model.eval()
        return self._built

    def forward(self, call: Call) -> Message:
        """Every tensor of the model's output."""
        return _message(self._evaluated(call.tensors, lambda model, inputs: _parts(model(**inputs, **call.options))))

    def log_probs(self, call: Call) -> Message:
        """Of the tokens `labels` [rows, tokens], from the second on, in fp32: 4 bytes a token."""

        def function(model: Any, inputs: Any) -> dict[str, Tensor]:
            given = dict(inputs)
            labels = given.pop("labels")
            logits = model(**given).logits[:, :-1]
            rows = [
                torch.log_softmax(row.float(), -1).gather(-1, wanted.clamp(min=0)[:, None])[:, 0]
                for row, wanted in zip(logits, labels[:, 1:], strict=True)
            ]
            return {"log_probs": torch.stack(rows)}

        return _message(self._evaluated(call.tensors, function))

    def _evaluated(self, inputs: Mapping[str, Tensor], function: Callable[[Any, Any], dict[str, Tensor]]) -> Any:
        return self._engine(inputs).evaluate(inputs, function)

    def hidden(self, call: Call) -> Message:
        """The base model's output."""
        self._engine(call.tensors)
        with torch.no_grad():
            return _message(_parts(self._model.base_model(**call.tensors, **call.options)))

    @torch.no_grad()
    def head(self, call: Call) -> Message:
        """Weight and bias of the output embeddings, whole."""
        head = self._model.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(self._model).__name__} has no output embeddings")
        with gathered(head):
            found = {name: p.detach().to("cpu", copy=True) for name, p in head.named_parameters()}
        line = self._mesh.views["batch"]
        source = collectives.all_gather_object(line, bool(found)).index(True)  # one stage has it
        found = collectives.broadcast_object(line, found, source)
        return _message(found)


def _parts(output: Any) -> dict[str, Any]:
    """The tensors of a model's output. Read on every rank: what is not whole is gathered then."""
    fields = {name: getattr(output, name) for name in getattr(output, "__dataclass_fields__", ())} or dict(output)
    sent = {n: v.to("cpu", copy=True) if isinstance(v, Tensor) else v is not None for n, v in fields.items()}
    return sent  # True: there is one, and it is no tensor


def _message(found: Mapping[str, Any]) -> Message:
    """Tensors, the names of all fields, and of those that are there and cannot be sent."""
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    left_out = [name for name, value in found.items() if value is True]
    return {"names": list(tensors), "fields": list(found), "left_out": left_out}, list(tensors.values())
