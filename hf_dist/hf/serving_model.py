"""A role with a model: it loads the model in its own layout and answers outputs, log-probabilities and the head."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_dist.config import BatchSizes, DistConfig, resolve_without_trainer
from hf_dist.config.roles import RoleConfig
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
from hf_dist.hf.serving_training import Training, arguments_of, fields_of, in_mode
from hf_dist.planning.role_parts import role_dtype
from hf_dist.remote.functions import Functions
from hf_dist.remote.offer import Offer
from hf_dist.remote.outputs import packed
from hf_dist.remote.serving import Call, Calls, Release, Server, serve
from hf_dist.remote.visits import Visits, serve_jobs
from hf_dist.sharding.full_params import gathered

__all__ = ["serve_role"]


def serve_role(place: Place, role: RoleConfig, config: DistConfig) -> int:
    """Serve the role's model in the layout `config`, and its functions, until the trainer has ended. Every rank calls it.

    Returns how many calls were answered. A role that other jobs ask is served for ever.
    """
    name, offer = place.role.name, Offer(place.role.name, place.role.size, role.functions)
    if not role.model:
        mesh = mesh_for(config)
        served = None
    else:
        found = model_config(role.model, said_by=f"hf_dist.roles.{name}.model")
        model = from_pretrained(model_class(architecture_of(found) or "AutoModelForCausalLM"), role.model)
        model.config.use_cache = False  # no answer has one
        mesh = mesh_for(config, model=model)
        on_gpu = mesh.device.type == "cuda"
        served = _Served(model, resolve_without_trainer(config, data_ranks=mesh.data.size, on_gpu=on_gpu), mesh)
        offer = _with_model(offer, model, role_dtype(config))
    if role.port:
        serve_jobs(Visits(place, mesh, role.port, offer), place, mesh, lambda: _answers(name, role, mesh, served))
    server = Server(place, mesh)
    return serve(server, *_answers(name, role, mesh, served, server.students))


def _with_model(offer: Offer, model: Any, dtype: str) -> Offer:
    """The same, with what a stand-in of the model needs."""
    generation = getattr(model, "generation_config", None)
    config = json.loads(model.config.to_json_string(use_diff=False))
    return replace(
        offer, dtype=dtype, config=config,
        generation=None if generation is None else json.loads(generation.to_json_string(use_diff=False)),
    )  # fmt: skip


def _answers(
    name: str, role: RoleConfig, mesh: ParallelMesh, served: _Served | None, students: int = 0
) -> tuple[Calls, Release]:
    """What the role answers to one asking role. `students`: its data ranks, if it may train the weights; else 0."""
    functions = Functions(mesh, role.functions, name)
    if served is None:
        return functions.calls, functions.release
    if not students:
        return {**served.calls, **functions.calls}, functions.release
    training = served.training(students)

    def release(student: int, numbers: Sequence[int]) -> None:
        training.release(student, numbers)
        functions.release(student, numbers)

    return {**served.calls, **training.calls, **functions.calls}, release


class _Served:
    def __init__(self, model: nn.Module, config: DistConfig, mesh: ParallelMesh) -> None:
        self._model: Any = model
        self._config, self._mesh = config, mesh
        self._built: Engine | None = None
        self._example: Call | None = None
        """The last call of `hidden`, with which the head is tried."""

    def training(self, students: int) -> Training:
        """The end of a role that so many data ranks may train."""
        return Training(self._trained_engine, self._mesh, students)

    @property
    def calls(self) -> Calls:
        """What frozen weights answer. Every rank of the role makes each call."""
        return {"forward": self.forward, "hidden": self.hidden, "log_probs": self.log_probs, "head": self.head}

    def _engine(self, inputs: Mapping[str, Any], *, trainable: bool = False) -> Engine:
        """The model's engine; the first call makes it, because its inputs are the example for pipeline stages."""
        if self._built is None:
            batch = BatchSizes(None, None, 1, self._mesh.data.size)
            example = Example(lambda: dict(inputs)) if inputs else None
            self._built = build_engine(
                self._model, self._config, self._mesh, batch, trainable=trainable, example=example
            )
        return self._built

    def _trained_engine(self, inputs: Mapping[str, Any]) -> Engine:
        engine = self._engine(inputs, trainable=True)
        if engine.optimizer is None:
            raise ModelError(
                "one stand-in for this role trains, and another, whose call came first, does not: make one"
            )
        return engine

    def forward(self, call: Call) -> Message:
        """Every tensor of the model's output."""
        arguments, _ = arguments_of(call)
        return packed(self._evaluated(call, lambda model, inputs: fields_of(model(**inputs, **arguments))))

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

        return packed(self._evaluated(call, function))

    def _evaluated(self, call: Call, function: Callable[[Any, Any], dict[str, Any]]) -> Any:
        arguments, seed = arguments_of(call)
        engine = self._engine({**call.tensors, **arguments})
        with in_mode(engine, seed):
            return engine.evaluate(call.tensors, function)

    def hidden(self, call: Call) -> Message:
        """The base model's output."""
        self._engine({**call.tensors, **call.options}).eval()
        self._example = call
        with torch.no_grad():
            return packed(fields_of(self._model.base_model(**call.tensors, **call.options)))

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
        self._check_head(found)
        return packed(found)

    def _check_head(self, found: Mapping[str, Tensor]) -> None:
        """Raise `ModelError` if the model does more to its hidden states than this head: the asking role would leave it out."""
        call = self._example
        if call is None or self._mesh.pp.size > 1:
            return
        given = {**call.tensors, **{name: value for name, value in call.options.items() if name != "logits_to_keep"}}
        hidden = fields_of(self._model.base_model(**given))["last_hidden_state"]
        logits = fields_of(self._model(**given))["logits"]
        most = 1e-3 if logits.dtype == torch.float32 else 0.05  # logits in a half dtype are rounded
        logits = logits.float()
        bias = found.get("bias")
        alone = nn.functional.linear(hidden.float(), found["weight"].float(), None if bias is None else bias.float())
        if not torch.allclose(alone, logits, rtol=most, atol=most * float(logits.abs().max())):
            raise ModelError(
                f"{type(self._model).__name__} does more to its hidden states than its head, such as a scale or a cap of its "
                "logits: ask for its logits, teacher(...), in place of teacher.base_model(...)"
            )
