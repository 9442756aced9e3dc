"""Run an unmodified script sharded: `torchrun -m hf_dist.run train.py --deepspeed zero3.json`.

    torchrun --nproc_per_node 8 -m hf_dist.run train.py --deepspeed zero3.json --output_dir out
    accelerate launch -m hf_dist.run --config zero3.json no_trainer.py --lr 1e-4
    torchrun --nproc_per_node 8 -m hf_dist.run --config zero3.json -m trl.scripts.sft --model_name_or_path ...

    torchrun --nproc_per_node 2 -m hf_dist.run --config teacher.json    # no script: serves other jobs

All arguments after the script (or module) are passed to it. Use `--config` for scripts without a `--deepspeed` option.
"""

from __future__ import annotations

import os
import runpy
import sys

_USAGE = "usage: python -m hf_dist.run [--config FILE] (script.py | -m module) [arguments of the script ...]"


def main(arguments: list[str]) -> None:
    """Replace the stock classes by ours, then run the script as `__main__`. Every rank calls it."""
    arguments = list(arguments)
    while arguments and arguments[0].startswith("--config"):
        name, equals, value = arguments.pop(0).partition("=")
        if name != "--config" or not (equals or arguments):
            sys.exit(_USAGE)
        os.environ["HF_DIST_CONFIG"] = value if equals else arguments.pop(0)
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[is_module:]
    serves = not (is_module or arguments) and "HF_DIST_CONFIG" in os.environ
    if not serves and (not arguments or arguments[0].startswith("-")):
        print(__doc__)
        sys.exit(_USAGE)
    from hf_dist.dist import excepthook

    excepthook.install()
    if not is_module and not serves:
        from hf_dist.config.load import check_script

        check_script(arguments[0])
    from hf_dist.hf.substitute import divide_into_roles, substitute

    substitute()
    divide_into_roles()
    if serves:
        sys.exit(f"{_USAGE}\nOnly a config whose roles have a port is started without a script: it serves other jobs.")
    sys.argv = arguments
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
