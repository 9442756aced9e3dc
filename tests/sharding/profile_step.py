"""Where the time of a training step goes at each ZeRO stage, in milliseconds of one rank.

    python -m tests.sharding.profile_step [--stages 0 1 2 3] [--steps 8] [--dtype bf16] [--ranks 2] [--accumulation 1]

Ranks over gloo, an HF Llama of 26M parameters, 4 x 256 tokens, fused AdamW, clipping. The engine's own functions are timed
by a stack of clocks: each row is what a function took without the functions below it. "The model" is all the rest: its
forward and backward, Python included, and what it waits for a core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from tests.estimate_peak import MODELS, llama
from tests.harness import run_ranks


class Clock:
    """Exclusive seconds by name: an inner call's time is not its caller's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Time every call of `owner.attribute` as `name`."""
        function: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.seconds[name] += took - self._inner.pop()
                self._inner[-1] += took

        setattr(owner, attribute, timed)


def install(clock: Clock) -> None:
    """Clocks on the engine's functions, in this process from now on; before an engine is made, which binds some."""
    from hf_dist.dist import collectives
    from hf_dist.engine import engine, window
    from hf_dist.optim.attach import FragmentedOptimizer
    from hf_dist.sharding.group import FlatGroup
    from hf_dist.sharding.hooks import Passes
    from hf_dist.sharding.runtime import ShardedModel
    from hf_dist.sharding.window_gradient import WindowGradient

    for hook in (
        *("_enter", "_leave", "_touch_root", "_pre_forward", "_post_forward", "_pre_backward"),
        *("_gradient_ready", "_begin_backward", "_finish_backward"),
    ):
        clock.wrap(Passes, hook, "hooks, order, bookkeeping")
    clock.wrap(FlatGroup, "unshard", "gathers: storage, cast, sends posted")
    clock.wrap(FlatGroup, "reshard", "gathers: storage freed")
    clock.wrap(WindowGradient, "add", "gradients: copy into the flat buffer")
    clock.wrap(FlatGroup, "reduce", "gradients: cast for the wire, sends posted")
    clock.wrap(collectives.Handle, "wait", "gradients: sum of what arrived")
    clock.wrap(collectives, "block_on", "waiting for collectives")
    clock.wrap(window, "summarize_gradients", "norm")
    clock.wrap(window, "scale_gradients", "clipping")
    clock.wrap(FragmentedOptimizer, "step", "optimizer")
    clock.wrap(ShardedModel, "weights_changed", "weights written back")
    clock.wrap(engine.Engine, "step", "rest of the step")


def profile(rank: int, world: int, config: dict[str, Any], steps: int) -> dict[str, float]:
    """Median milliseconds by row, over `steps` steps."""
    import hf_dist

    clock = Clock()
    install(clock)
    *_, vocabulary, seq, rows = MODELS["small"]
    torch.manual_seed(0)
    engine = hf_dist.initialize(llama("small"), config=config, device="cpu")
    found: dict[str, list[float]] = defaultdict(list)
    for step in range(steps + 2):
        clock.seconds.clear()
        start = time.perf_counter()
        for _ in range(engine.batch.accumulation):
            ids = torch.randint(vocabulary, (rows, seq))
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        total = time.perf_counter() - start
        if step >= 2:
            found["step"].append(total)
            found["the model"].append(total - sum(clock.seconds.values()))
            for name, seconds in clock.seconds.items():
                found[name].append(seconds)
    return {name: 1e3 * statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Print one table, stages side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--overlap", action="store_true", help="zero_optimization.overlap_comm")
    arguments = parser.parse_args()
    columns = []
    for stage in arguments.stages:
        config = {
            "train_micro_batch_size_per_gpu": MODELS["small"][-1],
            "gradient_accumulation_steps": arguments.accumulation,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": stage, "overlap_comm": arguments.overlap},
            "bf16": {"enabled": arguments.dtype == "bf16"},
            "communication_data_type": arguments.dtype,
        }
        columns.append(run_ranks(profile, arguments.ranks, (config, arguments.steps), timeout=900)[0])
    names = dict.fromkeys(name for column in columns for name in column)
    print(f"load {os.getloadavg()[0]:.1f}; milliseconds of a step, median of {arguments.steps}")
    print("| | " + " | ".join(f"stage {stage}" for stage in arguments.stages) + " |")
    print("|---|" + "--:|" * len(columns))
    for name in names:
        print(f"| {name} | " + " | ".join(f"{column.get(name, 0.0):.1f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
