"""Mixtures of experts: the load-balancing loss over all ranks."""

__all__: list[str] = []
