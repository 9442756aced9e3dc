"""The order of what backward does with `tp_overlap_comm`, and losses under autocast; what a rank does in its test."""

from __future__ import annotations

from typing import Any

from tests.parallel.tensor.on_ranks import batch, engine_of, llama


def narrow(world: int, early: bool) -> list[float]:
    """Losses of two steps under autocast, with or without the overlap."""
    section = {"autotp_size": world, "tp_overlap_comm": early}
    autocast = {"enabled": True, "dtype": "torch.bfloat16"}
    engine = engine_of(llama(), world, tensor_parallel=section, torch_autocast=autocast)
    return [float(engine.train_batch(iter([batch()]))) for _ in range(2)]


def order(rank: int, world: int) -> dict[Any, Any]:
    """(overlap, regions) -> what happened in the second backward, in order; bytes by operation. Overlap -> `narrow`."""
    from hf_dist.dist import comm_counter
    from hf_dist.parallel.tensor import overlap, peers

    happened: list[str] = []

    def logged(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            happened.append(name)
            return function(*args, **kwargs)

        return call

    def started(function: Any) -> Any:
        def call(*args: Any) -> Any:
            happened.append("start")
            tensor, wait = function(*args)
            return peers.Started(tensor, logged("wait", wait))

        return call

    peers.MeshPeers.start_sum = started(peers.MeshPeers.start_sum)  # type: ignore[method-assign]
    peers.MeshPeers.start_scatter_sum = started(peers.MeshPeers.start_scatter_sum)  # type: ignore[method-assign]
    overlap._Product.backward = staticmethod(logged("dx", overlap._Product.backward))  # type: ignore[method-assign]
    overlap._Token.backward = staticmethod(logged("dW", overlap._Token.backward))  # type: ignore[method-assign]
    found: dict[Any, Any] = {early: narrow(world, early) for early in (False, True)}
    for early in (False, True):
        for regions in (False, True):
            section = {"autotp_size": world, "tp_overlap_comm": early}
            engine = engine_of(llama(), world, tensor_parallel=section, hf_dist={"sequence_regions": regions})
            for _ in range(2):
                with comm_counter.record() as log:
                    loss = engine(**batch()).loss
                    happened.clear()
                    engine.backward(loss)
                    seen = list(happened)
                engine.step()
            found[early, regions] = seen, {op: log.nbytes(op) for op in ("all_reduce", "all_gather", "reduce_scatter")}
    return found
