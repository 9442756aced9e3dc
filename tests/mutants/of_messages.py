"""Faults in encoded messages: between stages, of meetings, in factors."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: list[Mutant] = [
    Mutant(
        "a position bias is encoded like a hidden state",
        "parallel/pipeline/freight.py",
        "(s.dtype, len(s.shape), s.shape[-1] if s.shape else 0) == kind and",
        "bool(s.shape) and s.dtype == kind[0] and",
        ("parallel/pipeline/freight/test_freight.py::test_only_hidden_states_are_encoded",),
    ),
    Mutant(
        "the vector of a token does not begin a block",
        "parallel/pipeline/freight.py",
        "        missing = -tensor.shape[-1] % self.codec.block\n",
        "        missing = 0\n",
        ("parallel/pipeline/freight/test_freight.py",),
    ),
    Mutant(
        "encoded movements without an anchor are weights",
        "parallel/local_sgd/outer.py",
        "config.is_served or encoded or config.outer_lr != 1",
        "config.is_served or config.outer_lr != 1",
        ("parallel/local_sgd/test_encoded.py",),
    ),
    Mutant(
        "the mean of fragments before a save is encoded",
        "parallel/local_sgd/outer.py",
        "motion.weights, motion.become, None)",
        "motion.weights, motion.become, motion.wire)",
        ("parallel/local_sgd/test_encoded.py",),
    ),
    Mutant(
        "a loss scale changes the unit of movements",
        "dist/coded.py",
        "in self.residuals.values() if self.of_gradients else ():",
        "in self.residuals.values():",
        ("parallel/local_sgd/test_encoded.py::test_a_loss_scale_does_not_change_the_unit_of_movements",),
    ),
    Mutant(
        "factors forget what a rank left out",
        "dist/low_rank.py",
        "        return rest.values[first : first + gradient.numel()].view(gradient.shape) + gradient\n",
        "        return gradient.float()\n",
        ("sharding/wires/test_factors.py",),
    ),
    Mutant(
        "a step with inf spoils the directions of the next one",
        "dist/low_rank.py",
        "torch.where(values.isfinite().all(), values, before)",
        "values",
        ("sharding/wires/test_factors.py",),
    ),
    Mutant(
        "a resumed run sends whole gradients again",
        "sharding/wires.py",
        "return self.feedback or self.low_rank is not None",
        "return self.feedback",
        ("sharding/wires/test_factors.py",),
    ),
    Mutant(
        "a wrapper around PowerSGD is lost",
        "hf/comm_hook.py",
        '    elif wrapper != "no":\n',
        '    elif wrapper == "none":\n',
        ("hf/test_comm_hook.py",),
    ),
]
