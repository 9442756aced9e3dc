"""TRL's own client over vLLM's own packing, where vLLM imports; stand-ins for the network and for streams of a GPU only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

BUFFER = 20_000
"""Bytes of a package: several per synchronisation, of several tensors each."""


class Wire:
    """In the place of NCCL: packages in their order, from the trainer to the worker."""

    def __init__(self) -> None:
        self.packages: list[torch.Tensor] = []
        self.count = 0

    def broadcast(self, package: torch.Tensor, src: int) -> None:
        """The trainer's end."""
        self.packages.append(package.clone())
        self.count += 1

    def receive(self, package: torch.Tensor, src: int) -> None:
        """The worker's end."""
        package.copy_(self.packages.pop(0))


@contextmanager
def without_gpu() -> Iterator[None]:
    """What vLLM's packing asks of a GPU."""
    from vllm.distributed.weight_transfer import packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    with ExitStack() as stack:
        for owner, name, instead in (
            (packed_tensor, "_get_streams", lambda device, count: [stream] * count),
            (torch.cuda, "stream", lambda stream: nullcontext()),
            (torch.accelerator, "current_device_index", lambda: 0),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


def real_client() -> Callable[..., Any]:
    """TRL's class, whose requests reach nobody and whose packages reach vLLM's own receiver. Needs vLLM."""
    from trl.generation import vllm_client
    from vllm.distributed.weight_transfer import packed_tensor

    vllm_client.packed_nccl_broadcast_producer = functools.partial(
        packed_tensor.packed_nccl_broadcast_producer, buffer_size_bytes=BUFFER
    )

    class Client(vllm_client.VLLMClient):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(base_url="http://localhost:1")
            self.weights: dict[str, torch.Tensor] = {}
            self.most_gathered = 0
            self.announced: dict[str, Any] = {}

        def check_server(self, *args: Any, **kwargs: Any) -> None:
            """Nobody is there."""

        def init_communicator(self, device: Any) -> None:
            self.communicator = Wire()

        def close_communicator(self) -> None:
            """Nothing was opened."""

        def reset_prefix_cache(self) -> None:
            """No cache."""

        def _get(self, url: str, **kwargs: Any) -> Any:
            return {"data": [{"id": "model"}]}

        def _post(self, url: str, **kwargs: Any) -> Any:
            if url.endswith("/update_weights"):
                self.announced = kwargs["json"]["update_info"]

        def update_named_params(self, metadata: list[Any], named_params: Any) -> None:
            with without_gpu():
                super().update_named_params(metadata, named_params)
                told = zip(*(self.announced[key] for key in ("names", "shapes", "dtype_names")), strict=True)
                packed_tensor.packed_nccl_broadcast_consumer(
                    iterator=iter([(name, (shape, getattr(torch, dtype))) for name, shape, dtype in told]),
                    group=SimpleNamespace(broadcast=self.communicator.receive),
                    src=0,
                    post_unpack_func=lambda pairs: self.weights.update({n: t.clone() for n, t in pairs}),
                    buffer_size_bytes=BUFFER,
                    device="cpu",
                )
            assert self.communicator.count > 1 and not self.communicator.packages

    return Client
