"""A link between two processes of different roles: a JSON header and tensors as bytes, each way. Nothing is unpickled."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dist.dist.wires import Wire
from hf_dist.errors import RemoteError

__all__ = ["Link", "Message"]

Message = tuple[dict[str, Any], list[Tensor]]
"""A header and tensors on the host."""
_MOST = 1 << 24
"""Bytes of a header; more is none."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


class Link:
    """One of its two ends. Both ends are made in the same order on the two processes; one thread at a time uses an end."""

    def __init__(self, wire: Wire, peer: str) -> None:
        """`wire`: its bytes' way. `peer`: the other process, for errors."""
        self.wire = wire
        self._peer = peer
        self._lock = threading.Lock()
        self.sent_nbytes = 0
        """Of tensors, without headers."""
        self.received_nbytes = 0
        self.is_broken = False
        """Whether the other end is gone, or what it sent is not understood."""

    def send(self, header: Mapping[str, object], tensors: Sequence[Tensor] = ()) -> None:
        """Send to the other end; returns when the bytes are taken over. Raises `RemoteError` if the other end is gone."""
        host = [t.detach().to("cpu").contiguous() for t in tensors]
        described = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in host]
        text = json.dumps({**header, "tensors": described}).encode()
        assert len(text) < _MOST, "a header holds no data"
        parts = [torch.tensor([len(text)]), torch.frombuffer(bytearray(text), dtype=torch.uint8)]
        parts += [_as_bytes(t) for t in host if t.numel()]
        with self._lock, self._watched():
            self.wire.send(parts)
        self.sent_nbytes += sum(t.nbytes for t in host)

    def receive(self) -> Message:
        """What the other end sent next; waits for it. Raises `RemoteError` if the other end is gone or late."""
        with self._watched():
            length = int(self._take(torch.zeros(1, dtype=torch.int64)))
            if not 0 < length < _MOST:
                raise RemoteError(f"{self._peer} sent a header of {length} bytes, which is none of hf_dist's")
            text = bytes(self._take(torch.empty(length, dtype=torch.uint8)).numpy())
            try:
                header = json.loads(text)
                tensors = [torch.empty(shape, dtype=_DTYPES[name]) for name, shape in header.pop("tensors")]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise RemoteError(f"{self._peer} sent {text[:40]!r}, which is none of hf_dist's headers") from error
            for tensor in tensors:
                if tensor.numel():
                    self._take(_as_bytes(tensor))
        self.received_nbytes += sum(t.nbytes for t in tensors)
        return header, tensors

    def close(self) -> None:
        """Give the wire up. Idempotent."""
        self.is_broken = True
        self.wire.close()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Inside, an error of the transport becomes one that names the other end."""
        try:
            yield
        except RemoteError:
            self.is_broken = True
            raise
        except (RuntimeError, OSError) as error:
            self.is_broken = True
            if "imed out" in str(error):
                raise RemoteError(f"{self._peer} did not answer in time") from error
            raise RemoteError(f"{self._peer} has ended", ended=self._peer) from error

    def _take(self, tensor: Tensor) -> Tensor:
        self.wire.take(tensor)
        return tensor


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
