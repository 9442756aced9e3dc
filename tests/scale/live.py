"""Bytes of all storages that are alive, and their peak; kept up to date rather than summed up."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class Live:
    """Told of every tensor that an operator returns. Storages that grow, shrink or end are followed."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Now."""
        self.peak = 0
        """Since the start, or since somebody set it to `nbytes`."""
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def see(self, tensor: torch.Tensor) -> None:
        """A tensor exists."""
        with torch._C.DisableTorchFunctionSubclass():  # of freed weights one may ask no more than this
            storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        me = weakref.ref(self)

        def gone(reference: Any) -> None:
            live = me()
            if live is not None:
                live.nbytes -= live._known.pop(key)[1]

        self._known[key] = weakref.ref(storage, gone), 0
        self._set(key, storage.nbytes())

    def _set(self, key: int, nbytes: int) -> None:
        reference, before = self._known[key]
        self._known[key] = reference, nbytes
        self.nbytes += nbytes - before
        self.peak = max(self.peak, self.nbytes)

    def __enter__(self) -> Live:
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
            out = original(storage, nbytes)
            if storage._cdata in self._known:
                self._set(storage._cdata, nbytes)
            return out

        self._original = original
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *exception: object) -> None:
        torch.UntypedStorage.resize_ = self._original  # type: ignore[method-assign]
