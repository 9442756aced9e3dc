"""Which process is the first on its machine, in a start with roles: counted within the role.

LOCAL_RANK counts all processes of the machine, since it names a GPU. The first process of a role may have another than 0, and
nobody of the role would then do what "the local main process" does: make a tokenizer, map a dataset, log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_dist.dist.roles import place

__all__ = ["LocalPlaceMixin", "local_index"]


def local_index(in_start: int) -> int:
    """This process's number among those of its role on this machine; `in_start`: among all. Local."""
    where = place()
    return in_start if where is None else where.local_rank


class LocalPlaceMixin:
    """Overrides of accelerate's `Accelerator`; part of `DistAccelerator`."""

    state: Any

    @property
    def local_process_index(self) -> int:
        """Like accelerate's, within the role."""
        return local_index(int(self.state.local_process_index))

    @property
    def is_local_main_process(self) -> bool:
        """Whether it is the first of its role on this machine."""
        return self.local_process_index == 0

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Like accelerate's, within the role."""
        own: Any = self
        if not self.is_local_main_process:
            own.wait_for_everyone()
        yield
        if self.is_local_main_process:
            own.wait_for_everyone()
