"""Mixtures of experts: the load-balancing loss over all ranks, adapters on stacked experts, experts spread over ranks."""

__all__: list[str] = []
