"""A frozen model of another role, called like a module: `hf_dist.remote_model("teacher")`.

The stand-in is of the model's own class, with its config, dtype and device, and holds no weights. A call sends this data
rank's rows to the role; what is read of the answer is waited for then, so that the role computes beside this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_dist.dist import collectives
from hf_dist.dist.axes import Axes
from hf_dist.dist.link import Message
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.dist.roles import Place
from hf_dist.errors import ModelError
from hf_dist.hf.model_class import architecture_of, model_config, new_model
from hf_dist.remote.asking import Asker, asker_of

__all__ = ["Answer", "RemoteModel", "stand_in"]


class Answer(Mapping[str, Any]):
    """A model's output that is under way. Reading any part of it waits for all. Every rank that shares rows reads it."""

    def __init__(self, model: RemoteModel, future: Future[Message] | None) -> None:
        self._model = model
        self._future = future
        self._found: tuple[dict[str, Tensor | None], frozenset[str]] | None = None

    def _all(self) -> tuple[dict[str, Tensor | None], frozenset[str]]:
        if self._found is None:
            self._found = self._model._received(self._future)
        return self._found

    def _wait(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._all()[0].items() if value is not None}

    def __getattr__(self, name: str) -> Tensor | None:
        """None for a field that the model has left empty, as in transformers."""
        if name.startswith("_"):
            raise AttributeError(name)
        fields, left_out = self._all()
        if name in left_out:
            raise ModelError(f"role {self._model._asker.role}: {name} is no tensor, and only tensors are sent")
        if name not in fields:
            raise AttributeError(f"the output of {type(self._model).__name__} has no {name}")
        return fields[name]

    def __getitem__(self, key: str | int | slice) -> Any:
        return self._wait()[key] if isinstance(key, str) else tuple(self._wait().values())[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._wait())

    def __len__(self) -> int:
        return len(self._wait())

    def to_tuple(self) -> tuple[Tensor, ...]:
        """Its parts, in order."""
        return tuple(self._wait().values())


class RemoteModel(PreTrainedModel):
    """The part of a stand-in that is its own; its class derives from the model's, too."""

    _asker: Asker
    _mesh: ParallelMesh | None
    _shares_rows: bool
    _device: torch.device

    def bind(self, mesh: ParallelMesh) -> None:
        """Tell which ranks read the same rows as this one; `accelerator.prepare` calls it."""
        self.__dict__.update(_mesh=mesh, _device=mesh.device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Like the model's own, without gradients; the role computes it."""
        return self._ask("forward", args, kwargs)

    def _ask(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        if len(args) > 1:
            raise ModelError(f"role {self._asker.role}: give all arguments but the first by their names")
        given = dict(zip((self.main_input_name,), args, strict=False)) | kwargs
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        plain = {n: v for n, v in given.items() if n not in tensors and v is not None and n != "return_dict"}
        strange = [
            f"{name} ({type(v).__name__})" for name, v in plain.items() if not isinstance(v, bool | int | float | str)
        ]
        if strange:
            raise ModelError(
                f"role {self._asker.role}: {', '.join(strange)} cannot be sent. Send tensors and plain values"
            )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()):
            raise ModelError(f"role {self._asker.role} is frozen: no gradient comes back to its inputs. Detach them")
        if self._mesh is None and self._shares_rows:
            raise ModelError(
                f"role {self._asker.role}: ranks share rows, so the model must know their groups before its first call. Call "
                "accelerator.prepare_model(model, evaluation_mode=True), as TRL does"
            )
        leads = self._mesh is None or self._mesh.views["batch"].rank == 0
        return Answer(self, self._asker.ask(call, tensors, **plain) if leads else None)

    def _received(self, future: Future[Message] | None) -> tuple[dict[str, Tensor | None], frozenset[str]]:
        message = None if future is None else future.result()
        if self._mesh is not None and self._mesh.views["batch"].size > 1:
            message = collectives.broadcast_object(self._mesh.views["batch"], message)
        assert message is not None
        header, tensors = message
        found: dict[str, Tensor | None] = dict.fromkeys(header["fields"])
        found |= {name: t.to(self._device) for name, t in zip(header["names"], tensors, strict=True)}
        return found, frozenset(header["left_out"])

    @property
    def dtype(self) -> torch.dtype:
        """That of the role's weights."""
        return self.__dict__["_remote_dtype"]

    @property
    def device(self) -> torch.device:
        """This rank's, where answers arrive."""
        return self._device

    def get_input_embeddings(self) -> nn.Module:
        """A module without weights: TRL and HF ask for it to know that this is a language model."""
        base: Any = self.base_model
        embeddings: nn.Module = base.embed_tokens
        return embeddings

    def generate(self, *args: object, **kwargs: object) -> Any:
        """Refused: a role answers forwards."""
        raise ModelError(f"role {self._asker.role}: generate() is not among what a role answers")


class _Backbone(nn.Module):
    """In the place of the base model: hidden states come from the role."""

    _whole: RemoteModel

    def __init__(self, whole: RemoteModel) -> None:
        super().__init__()
        self.embed_tokens = nn.Identity()
        self.__dict__.update(_whole=whole)  # the model's parent is no child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`last_hidden_state` [rows, tokens, hidden]."""
        return self._whole._ask("hidden", args, kwargs)


class _Head(nn.Module):
    """In the place of the output embeddings: the weight [vocabulary, hidden] comes from the role when it is read."""

    _whole: RemoteModel
    _found: dict[str, Tensor] | None

    def __init__(self, whole: RemoteModel) -> None:
        super().__init__()
        self.__dict__.update(_whole=whole, _found=None)  # the model's parent is no child

    def _weights(self) -> dict[str, Tensor]:
        found = self._found
        if found is None:
            found = self._whole._ask("head", (), {})._wait()
            self.__dict__["_found"] = found
        return found

    @property
    def weight(self) -> Tensor:
        """[vocabulary, hidden]."""
        return self._weights()["weight"]

    @property
    def bias(self) -> Tensor | None:
        """[vocabulary], or None."""
        return self._weights().get("bias")

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., vocabulary]."""
        return nn.functional.linear(hidden, self.weight, self.bias)


def stand_in(place: Place, role: str, model: str, axes: Axes, dtype: torch.dtype = torch.float32) -> Any:
    """The stand-in of the model in folder `model`, which `role` serves in `dtype`. `axes`: of the asking role."""
    config = model_config(model)
    name = architecture_of(config) or "AutoModelForCausalLM"
    with torch.device("meta"):
        made = new_model(name, config)
    own = type(made)
    whole: Any = made
    whole.__class__ = type(own.__name__, (RemoteModel, own), {"__module__": own.__module__})
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    for child, module in list(whole.named_children()):
        if child == own.base_model_prefix:
            setattr(whole, child, _Backbone(whole))
        elif module is head:
            setattr(whole, child, _Head(whole))
        else:
            delattr(whole, child)
    with_generation = getattr(whole, "generation_config", None) is not None
    whole.__dict__.update(
        _asker=asker_of(place, role, axes.coordinate("data", place.rank), axes.size("data")),
        _shares_rows=axes.size("batch") > 1,
        _mesh=None,
        _device=torch.device("cpu"),
        _remote_dtype=dtype,
    )
    if with_generation:
        with contextlib.suppress(OSError):  # without such a file HF has made one from the config
            whole.generation_config = GenerationConfig.from_pretrained(model)
    return whole.eval().requires_grad_(False)
