"""Locates a process by its Python stacks, from another thread: activity, block of the model, what it waits for.

Nothing is recorded while training runs; the location is computed on request.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import FrameType

from hf_dist.dist.collective_guard import line_of_user

__all__ = ["Location", "find_location"]

MAX_FRAMES = 16
"""Number of innermost frames reported, not counting torch's wrappers."""

WAITS_FOR_CALLS = "waiting for the trainer's next call"
"""The activity of a rank of a role that has nothing to do."""
# (end or part of the file's path, function or "" for any, words). The words of all frames, outermost first, are the activity.
_ACTIVITIES = (
    ("/hf_dist/remote/serving.py", "_received", WAITS_FOR_CALLS),
    ("/hf_dist/remote/visits.py", "next", WAITS_FOR_CALLS),
    (
        "/torch/_dynamo/convert_frame.py",
        "",
        "torch.compile",
    ),  # not its wrappers, which also run code that is compiled or skipped
    ("/torch/_inductor/", "", "torch.compile"),
    ("/transformers/trainer.py", "training_step", "training step"),
    ("/hf_dist/hf/trainer.py", "training_step", "training step"),
    ("/transformers/trainer.py", "evaluation_loop", "evaluation"),
    ("/transformers/trainer.py", "get_batch_samples", "data loader"),
    ("/transformers/trainer_callback.py", "call_event", "callbacks"),
    ("/transformers/generation/utils.py", "generate", "generation"),
    ("/torch/utils/data/", "__next__", "data loader"),
    ("/datasets/", "map", "mapping a dataset"),
    ("", "from_pretrained", "loading the model"),
    ("/hf_dist/dist/mesh.py", "build_mesh", "making process groups"),
    ("/hf_dist/engine/build.py", "build_engine", "preparing the model"),
    ("/hf_dist/checkpoint/save.py", "", "saving"),
    ("/hf_dist/hf/checkpointing.py", "_save_checkpoint", "saving"),
    ("/hf_dist/hf/checkpointing.py", "save_model", "saving"),
    ("/transformers/trainer.py", "_save_checkpoint", "saving"),
    ("/hf_dist/checkpoint/resume.py", "", "loading a checkpoint"),
    ("/hf_dist/engine/engine.py", "evaluate", "evaluation"),
    ("/hf_dist/engine/engine.py", "clip_grad_norm", "gradient norm"),
    ("/hf_dist/engine/engine.py", "apply_gradients", "optimizer step"),
    ("/torch/_tensor.py", "backward", "backward"),
    ("/torch/nn/modules/module.py", "_call_impl", "forward"),
)
MAY_TAKE_LONG = {"evaluation", "saving", "loading the model", "loading a checkpoint", "torch.compile", "generation"}
MAY_TAKE_LONG |= {"mapping a dataset", "callbacks", "preparing the model"}
"""Activities of one rank that may legitimately take minutes."""

_TRAINING = {"training step", "evaluation", "backward", "optimizer step"}

_COMMUNICATION = (
    "/hf_dist/dist/collectives.py", "/hf_dist/dist/groups.py", "/hf_dist/dist/mesh.py", "/hf_dist/dist/rendezvous.py",
    "/hf_dist/parallel/pipeline/p2p.py", "/hf_dist/dist/collective_guard.py", "/torch/distributed/",
)  # fmt: skip
_WEIGHTS, _TOKENS = "the gather of weights", "the exchange of tokens with the experts"
_WAITED_FOR = (
    ("/hf_dist/sharding/", "wait_unshard", _WEIGHTS),
    ("/hf_dist/parallel/experts/exchange.py", "", _TOKENS),
    ("/hf_dist/sharding/reducer.py", "", "the reduction of gradients"),
    ("/hf_dist/parallel/tensor/peers.py", "", "what the ranks of a split give each other"),
    ("/hf_dist/optim/clip.py", "", "the norm of all ranks' gradients"),
    ("/hf_dist/hf/stop_signal.py", "", "the question whether a rank was told to stop"),
    ("/hf_dist/parallel/pipeline/p2p.py", "", "its neighbour in the pipeline"),
    ("/hf_dist/parallel/sequence/outputs.py", "read_by", "the other ranks that share its rows to read logits, too,"),
)
_WRAPPERS = (
    "/torch/nn/modules/module.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/utils/_contextlib.py",
    "<frozen",
)


@dataclass(frozen=True)
class Location:
    """The location of one process."""

    activity: str = ""
    """Text such as `training step > backward`."""
    block: str = ""
    """Full name of the innermost running module or unit."""
    waits_for: str = ""
    """What the process waits for from other ranks; empty if it does not wait."""
    stack: tuple[str, ...] = ()
    """`file:line in function`, innermost last."""
    called: str = ""
    """A call, with its line, that every rank must make and in which this rank waits for the others; empty if none."""

    def __str__(self) -> str:
        parts = [self.activity or "Python code of the script", self.block]
        return ", ".join(part for part in parts if part)

    @property
    def as_dict(self) -> dict[str, object]:
        """A dict for JSON; `Location(**...)` restores it."""
        return asdict(self)


def find_location(names: Mapping[int, str], in_backward: str = "", thread: int | None = None) -> Location:
    """The location of a thread of this process, by default the main one. Any thread may call it; takes about 0.1 ms.

    `names`: id of a module -> its full name. `in_backward`: the unit whose backward began last, used while a backward runs in
    torch's own code.
    """
    frames = _frames(thread or threading.main_thread().ident or 0)
    activities = list(dict.fromkeys(filter(None, map(_activity, frames))))
    block = next(filter(None, (_block(frame, names) for frame in reversed(frames))), "")
    if not block and "backward" in activities:
        block = in_backward
    stack = [_line(frame) for frame in frames if not _is_in(frame, _WRAPPERS)]
    waits_for = _waits_for(frames)
    return Location(" > ".join(activities), block, waits_for, tuple(stack[-MAX_FRAMES:]), _called(frames, waits_for))


def _called(frames: list[FrameType], waits_for: str) -> str:
    """The call that every rank must make, if the thread waits in one: also the script's own forward, which communicates."""
    if frames and _is_in(frames[-1], ("/hf_dist/dist/collective_guard.py",)):
        return str(frames[-1].f_locals.get("called", ""))
    inside = {_activity(frame) for frame in frames}
    if waits_for not in (_WEIGHTS, _TOKENS) or "forward" not in inside or inside & _TRAINING:
        return ""
    outside = next(frame for frame in frames if _activity(frame) == "forward").f_back
    return f"the forward of the model at {line_of_user(outside)}"


def _frames(thread: int) -> list[FrameType]:
    """The frames of a thread, outermost first, including those of autograd or checkpoint threads that work for it."""
    stacks = sys._current_frames()
    # This thread's own frame and `stacks` would refer to each other, so tensors in the locals of all frames would live until
    # the cyclic collector runs (peak memory of a 0.5B model: 6.7 GB with the cycle, 5.2 without).
    stacks.pop(threading.get_ident())
    main = list(_outermost_first(stacks.get(thread)))
    if any(_is_in(frame, ("/hf_dist/checkpoint/save.py",)) and frame.f_code.co_name == "join" for frame in main):
        writers = [t.ident for t in threading.enumerate() if t.name == "hf_dist checkpoint" and t.ident]
        return main + [f for ident in writers for f in _outermost_first(stacks.get(ident))]
    if main and main[-1].f_code.co_name == "_engine_run_backward":
        # On GPUs, hooks run in autograd's own threads.
        for ident, innermost in stacks.items():
            frames = list(_outermost_first(innermost))
            if ident != thread and any(_is_in(f, ("/hf_dist/sharding/", "/hf_dist/parallel/experts/")) for f in frames):
                return main + frames
    return main


def _outermost_first(innermost: FrameType | None) -> Iterator[FrameType]:
    frames = []
    while innermost is not None:
        frames.append(innermost)
        innermost = innermost.f_back
    return reversed(frames)


def _is_in(frame: FrameType, files: Iterable[str]) -> bool:
    return any(part in frame.f_code.co_filename for part in files)


def _activity(frame: FrameType) -> str:
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    if file.endswith("/_utils/fetch.py") and "collate_fn" in linecache.getline(file, frame.f_lineno):
        return "collate"
    return next((words for part, name, words in _ACTIVITIES if part in file and name in ("", function)), "")


def _block(frame: FrameType, names: Mapping[int, str]) -> str:
    """The module or unit that this frame runs. Reads locals of torch's and our own frames only: reading a frame's locals
    keeps them alive as long as the frame, which must not happen to a user's activations."""
    code = frame.f_code
    if code.co_name == "_call_impl" and code.co_filename.endswith("/torch/nn/modules/module.py"):
        module = frame.f_locals.get("self")
        return names.get(id(module), type(module).__name__) or type(module).__name__
    if code.co_filename.endswith("/hf_dist/sharding/hooks.py") and "unit" in code.co_varnames:
        unit = frame.f_locals.get("unit")
        return "" if unit is None else getattr(unit, "name", "") or "the rest of the model"
    return ""


def _waits_for(frames: list[FrameType]) -> str:
    if frames and _is_in(frames[-1], ("/hf_dist/dist/collective_guard.py",)):
        return "every rank to make the same call"
    if not frames or not _is_in(frames[-1], _COMMUNICATION):
        return ""
    for frame in reversed(frames):
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        found = next((words for part, name, words in _WAITED_FOR if part in file and name in ("", function)), "")
        if found:
            return found
    outer = [i for i, frame in enumerate(frames) if not _is_in(frame, (*_COMMUNICATION, *_WRAPPERS))]
    first = frames[outer[-1] + 1 :] if outer else frames
    inside = [frame for frame in first if not _is_in(frame, _WRAPPERS)]
    return f"{inside[0].f_code.co_name}()" if inside else "other ranks"


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
