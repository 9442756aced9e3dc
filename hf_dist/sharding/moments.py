"""The moments of a sharded model's passes at which the engine above does something: one method each."""

from __future__ import annotations

import weakref

from hf_dist.sharding.group import FlatGroup

__all__ = ["Listener", "Moments"]


class Moments:
    """Does nothing at any moment: a sharded model without an engine. The engine is a subclass."""

    steps_in_backward = False
    """Whether `gradient_final` steps its group, which then has no gradient at the end of the window."""

    def before_forward(self) -> None:
        """Before each forward of the whole model. Collective where user code has written weights meanwhile."""

    def before_training(self, args: object, kwargs: object) -> None:
        """Before each forward that has a backward, with its arguments; may set `stay` of the units. First call collective."""

    def begin_backward(self) -> bool:
        """A backward has reached the model. Returns whether it is expected to be the last of its accumulation window."""
        return True

    def before_gradient_access(self) -> None:
        """User code is about to read, write or clear gradients. Local."""

    def gradient_final(self, group: FlatGroup) -> None:
        """The window's gradient of `group` is reduced over all its axes. Called only with `steps_in_backward`. Local."""

    def abandoned(self) -> None:
        """The gradients of the window were dropped, because a backward has raised. Local."""

    def in_use(self) -> bool:
        """Whether the model is being trained, so that its parameters must stay what they are. Local."""
        return False


class Listener:
    """Whom one sharded model tells. Held weakly: a model does not keep its engine, nor the optimizer states of the engine.

    The passes, the reducer and the gradients need it when they are made, the engine is made of them: so the engine connects
    last. This is the only place where something above the sharded model is known to it.
    """

    def __init__(self) -> None:
        self._nobody = Moments()
        self._engine: weakref.ref[Moments] | None = None

    def connect(self, engine: Moments) -> None:
        """From now on tell `engine`, and no longer an earlier one. Local."""
        self._engine = weakref.ref(engine)

    @property
    def now(self) -> Moments:
        """The engine while it is alive, else somebody who does nothing."""
        found = None if self._engine is None else self._engine()
        return self._nobody if found is None else found
