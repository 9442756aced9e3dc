"""A model of another role, called like a module: `hf_dist.remote_model("teacher")`.

The stand-in is of the model's own class, with its config, dtype and device, and holds no weights. A call sends this data
rank's rows to the role; what is read of the answer is waited for then, so that the role computes beside this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_dist.dist import collectives
from hf_dist.dist.axes import Axes
from hf_dist.dist.link import Message
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.errors import ModelError
from hf_dist.hf.model_class import architecture_of, new_model
from hf_dist.hf.remote_training import KeptCall, TrainedRole, through_autograd
from hf_dist.remote.asking import Asker
from hf_dist.remote.outputs import LEFT_OUT, unpacked
from hf_dist.remote.routes import SEED

__all__ = ["Answer", "RemoteModel", "generation_of", "stand_in"]


class Answer(Mapping[str, Any]):
    """A model's output that is under way. Reading any part of it waits for all. Every rank that shares rows reads it."""

    def __init__(
        self,
        model: RemoteModel,
        future: Future[Message] | None,
        finish: Callable[[dict[str, Any]], dict[str, Any]] = lambda fields: fields,
    ) -> None:
        """`finish`: what is done to the fields when they are read first."""
        self._model = model
        self._future = future
        self._finish = finish
        self._found: dict[str, Any] | None = None

    def _all(self) -> dict[str, Any]:
        if self._found is None:
            self._found = self._finish(self._model.received(self._future))
        return self._found

    def _wait(self) -> dict[str, Any]:
        return {name: value for name, value in self._all().items() if value is not None and value != LEFT_OUT}

    def __getattr__(self, name: str) -> Any:
        """None for a field that the model has left empty, as in transformers."""
        if name.startswith("_"):
            raise AttributeError(name)
        fields = self._all()
        if name not in fields:
            raise AttributeError(f"the output of {type(self._model).__name__} has no {name}")
        if isinstance(fields[name], str):
            raise ModelError(f"role {self._model.role}: {name} is no tensor, and only tensors are sent")
        return fields[name]

    def __getitem__(self, key: str | int | slice) -> Any:
        return self._wait()[key] if isinstance(key, str) else tuple(self._wait().values())[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._wait())

    def __len__(self) -> int:
        return len(self._wait())

    def to_tuple(self) -> tuple[Any, ...]:
        """Its parts, in order."""
        return tuple(self._wait().values())


class RemoteModel(PreTrainedModel):
    """The part of a stand-in that is its own; its class derives from the model's, too."""

    _asker: Asker
    _mesh: ParallelMesh | None
    _shares_rows: bool
    _device: torch.device
    _training_end: TrainedRole | None
    _joint_norm: bool
    trains: bool
    """Whether the role's weights are trained by the backwards here."""

    @property
    def role(self) -> str:
        """The name of the role."""
        return self._asker.role

    def bind(self, mesh: ParallelMesh) -> None:
        """Tell which ranks read the same rows as this one; `accelerator.prepare` calls it."""
        self.__dict__.update(_mesh=mesh, _device=mesh.device)

    def will_train(self, *, joint_norm: bool) -> None:
        """From now on, gradients flow through it. `joint_norm`: clip by one norm over all roles."""
        self.__dict__.update(trains=True, _joint_norm=joint_norm)
        self.train()

    @property
    def is_connected(self) -> bool:
        """Whether an optimizer step here steps the role, too."""
        return self._training_end is not None

    def connected(self) -> TrainedRole:
        """The end towards the weights that train; one for each stand-in."""
        if self._training_end is None:
            self.__dict__["_training_end"] = TrainedRole(self, joint_norm=self._joint_norm)
        assert self._training_end is not None
        return self._training_end

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Like the model's own; the role computes it. With gradients if the role trains and torch records them."""
        return_dict = kwargs.pop("return_dict", None)
        # Drawn here, so that activation checkpointing, which restores this generator, gets the same dropout again.
        how = {SEED: int(torch.randint(1 << 62, ()))} if self.training else {}
        if self.trains and torch.is_grad_enabled():
            answer = self._ask_with_gradients(args, {**kwargs, **how})
        else:
            answer = self._ask("forward" if not self.trains else "evaluate", args, {**kwargs, **how})
        return answer.to_tuple() if return_dict is False else answer

    def log_probs(self, labels: Tensor, **inputs: Any) -> Tensor:
        """Log-probability, fp32 [rows, tokens - 1], of the tokens `labels` [rows, tokens] from the second on: 4 bytes a token.

        Every rank that shares rows calls it. `inputs`: as for a forward, tensors by their names. Labels below 0 give the
        log-probability of token 0, to be masked. Waits for the answer.
        """
        found: Tensor = self._ask("log_probs", (), {"labels": labels, **inputs}).log_probs
        return found

    def _ask_with_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        if self._training_end is None:
            raise ModelError(
                f"role {self.role} trains, and no optimizer step here would step it: make it a part of the model that is "
                "trained (model.tower = hf_dist.remote_model(...)), or call accelerator.prepare(model, tower) on both"
            )
        tensors, plain = self._sorted(args, kwargs)
        future, number = self._sent("train", tensors, plain)
        kept, role = KeptCall(self._asker, number), self._training_end
        return Answer(self, future, lambda fields: through_autograd(role, kept, fields, tensors))

    def _ask(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        tensors, plain = self._sorted(args, kwargs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()):
            raise ModelError(f"role {self.role} is frozen: no gradient comes back to its inputs. Detach them")
        return Answer(self, self._sent(call, tensors, plain)[0])

    def _sorted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Arguments by their names: tensors, and plain values."""
        if len(args) > 1:
            raise ModelError(f"role {self.role}: give all arguments but the first by their names")
        given = dict(zip((self.main_input_name,), args, strict=False)) | kwargs
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        plain = {n: v for n, v in given.items() if n not in tensors and v is not None and n != "return_dict"}
        strange = [
            f"{name} ({type(v).__name__})" for name, v in plain.items() if not isinstance(v, bool | int | float | str)
        ]
        if strange:
            raise ModelError(f"role {self.role}: {', '.join(strange)} cannot be sent. Send tensors and plain values")
        return tensors, plain

    def _sent(
        self, call: str, tensors: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> tuple[Future[Message] | None, int]:
        """The answer to come, on the rank that asks for those that share its rows, and the number of the call."""
        if self._mesh is None and self._shares_rows:
            raise ModelError(
                f"role {self.role}: ranks share rows, so the model must know their groups before its first call. Call "
                "accelerator.prepare_model(model, evaluation_mode=True), as TRL does"
            )
        leads = self._mesh is None or self._mesh.views["batch"].rank == 0
        return self._asker.ask(call, tensors, **options) if leads else (None, 0)

    def send(self, call: str, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> Future[Message] | None:
        """Ask the role; every rank calls it, and `received` with the result where the answer is needed."""
        return self._sent(call, tensors, options)[0]

    def received(self, future: Future[Message] | None) -> dict[str, Any]:
        """The fields of an answer, on this rank's device. Collective over the ranks that share rows."""
        message = None if future is None else self._asker.wait(future)
        if self._mesh is not None and self._mesh.views["batch"].size > 1:
            message = collectives.broadcast_object(self._mesh.views["batch"], message)
        assert message is not None
        header, tensors = message
        return unpacked(header, [tensor.to(self._device) for tensor in tensors])

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
        raise ModelError(f"role {self.role}: generate() is not among what a role answers")


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
    _found: dict[str, Any] | None

    def __init__(self, whole: RemoteModel) -> None:
        super().__init__()
        self.__dict__.update(_whole=whole, _found=None)  # the model's parent is no child

    def _weights(self) -> dict[str, Any]:
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


def generation_of(source: str | Mapping[str, Any] | None) -> GenerationConfig | None:
    """The generation config of a folder or of values; None if there is none."""
    if not isinstance(source, str):
        return None if source is None else GenerationConfig.from_dict(dict(source))
    with contextlib.suppress(OSError):
        return GenerationConfig.from_pretrained(source)
    return None


def stand_in(
    asker: Asker,
    config: Any,
    axes: Axes,
    *,
    dtype: torch.dtype = torch.float32,
    generation: GenerationConfig | None = None,
) -> Any:
    """The frozen stand-in of the model of an HF config, which the role of `asker` serves in `dtype`.

    `axes`: of the asking role; `generation`: the model's; None: what HF makes from its config.
    """
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
    whole.__dict__.update(
        _asker=asker,
        _shares_rows=axes.size("batch") > 1,
        _mesh=None,
        _device=torch.device("cpu"),
        _remote_dtype=dtype,
        _training_end=None,
        _joint_norm=True,
        trains=False,
    )
    if generation is not None and getattr(whole, "generation_config", None) is not None:
        whole.generation_config = generation
    return whole.eval().requires_grad_(False)
