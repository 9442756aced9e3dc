"""Faults in products of eight bits: which layers, their weights' gathers and casts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: list[Mutant] = [
    Mutant(
        "scales of products depend on the largest element's digits",
        "float8/recipe.py",
        "round_scales_to_power_of_2=True",
        'round_scales_to_power_of_2=recipe != "tensorwise"',
        ("float8/test_parity.py",),
    ),
    Mutant(
        "a group without rows stays empty, and its weight's gradient unwritten",
        "float8/groups.py",
        ".clamp(min=1)",
        ".clamp(min=0)",
        ("float8/test_experts.py",),
    ),
    Mutant(
        "rows of an expert move as those of the one before",
        "float8/groups.py",
        "torch.searchsorted(ends, row, right=True)",
        "torch.searchsorted(ends, row)",
        ("float8/test_experts.py",),
    ),
    Mutant(
        "the adapters of experts hide their products in float8",
        "float8/stacks.py",
        "found.over(base) if isinstance(found, StackStandIn) else base",
        "found if isinstance(found, StackStandIn) else base",
        ("float8/test_experts.py",),
    ),
    Mutant(
        "experts multiply in bf16 where an argument is None",
        "float8/stacks.py",
        "for key, value in (kwargs or {}).items() if value is not None}",
        "for key, value in (kwargs or {}).items()}",
        ("float8/test_experts.py",),
    ),
    Mutant(
        "what looks at a model's structure sees experts in float8",
        "float8/linear.py",
        "kinds = (is_float8, is_mxfp8, is_float8_stack)",
        "kinds = (is_float8, is_mxfp8)",
        ("float8/test_experts.py",),
    ),
    Mutant(
        "sizes of MXFP8 layers are those of float8",
        "float8/recipe.py",
        'Kernels("MXFP8", BLOCK,',
        'Kernels("MXFP8", 16,',
        ("float8/test_blocks.py",),
    ),
    Mutant(
        "rows that fill no block are not cut off",
        "float8/blocks.py",
        "out[:count].reshape(",
        "out.reshape(",
        ("float8/test_blocks.py",),
    ),
    Mutant(
        "weights that multiply in float8 travel with scales that change their digits",
        "tensors/codecs/float8.py",
        "torch.where(stays, bits, exponent + _NEXT)",
        "torch.where(stays, bits, bits)",
        ("float8/test_gathers.py::test_what_arrives_is_cast_to_what_the_original_is_cast_to",),
    ),
    Mutant(
        "who reads weights inside of a forward gets those of the products",
        "sharding/group.py",
        "            if not (read and self.rest.as_products):\n",
        "            if self.full.is_current:\n",
        ("float8/test_gathers.py",),
    ),
    Mutant(
        "a gather for user code carries the rounding of products",
        "sharding/resting_weights.py",
        "None if whole and self.plan.wires.of_products else",
        "None if whole and not self.plan.wires.of_products else",
        ("float8/test_gathers.py",),
    ),
    Mutant(
        "an encoded shard outlives the step of another copy",
        "sharding/resting_weights.py",
        "        self._encoded, self._is_encoded = None, False\n        if self.second",
        "        if self.second",
        ("float8/test_gathers.py", "planning/test_mixed_traffic.py"),
    ),
    Mutant(
        "norms travel in float8 beside the layers",
        "sharding/units.py",
        "p.requires_grad, shares, name in apart]",
        "p.requires_grad, shares, bool(apart)]",
        ("float8/test_gathers.py",),
    ),
    Mutant(
        "casts of weights stay after the step",
        "sharding/runtime.py",
        "            unit.release_casts()\n",
        "            pass\n",
        ("float8/test_casts.py",),
    ),
    Mutant(
        "what user code writes in a window is not cast",
        "sharding/unit.py",
        "if stays and not written else None",
        "if stays else None",
        ("float8/test_casts.py",),
    ),
    Mutant(
        "backward multiplies with the casts of the forward",
        "float8/product.py",
        'return first, _cast(weight_t, backward, -1, "WEIGHT", mm_config)',
        "return first, first",
        ("gpu_sim/test_float8.py",),
    ),
    Mutant(
        "a backward in two parts computes each gradient twice",
        "float8/product.py",
        'return node.name().endswith("AccumulateGrad") or',
        "return bool(node) or",
        ("float8/test_product.py",),
    ),
    Mutant(
        "the input of a frozen layer is kept",
        "float8/product.py",
        "x if of_weight else None,",
        "x,",
        ("float8/test_product.py",),
    ),
    Mutant(
        "a window casts weights that come and go with each use",
        "sharding/unit.py",
        "stays = self.stay is Stay.WINDOW or all(g.is_replicated for g in groups)",
        "stays = True",
        ("float8/test_casts.py", "float8/test_gathers.py"),
    ),
]
"""Every planted fault."""
