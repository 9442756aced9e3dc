"""Faults in encoded messages: between stages, of meetings, in factors."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_WIRES = ("sharding/wires/test_wires.py",)

MUTANTS: list[Mutant] = [
    Mutant(
        "a rank keeps its own part of the weights as it was before it was encoded",
        "dist/coded.py",
        "            self.codec.encode(values, wire)\n            return wire\n",
        "            self.codec.encode(values * 1.001, wire)\n            return wire\n",
        _WIRES,
    ),
    Mutant(
        "the second hop forgets what the first one left out",
        "dist/coded.py",
        'wire.encoded("sums", partial)',
        'wire.encoded("parts", partial)',
        _WIRES,
    ),
    Mutant(
        "a mean over machines counts the ranks of one",
        "dist/coded.py",
        "out.view(1, part), wire.codec, 1.0 / axis.size).wait()",
        "out.view(1, part), wire.codec, 1.0 / far.size).wait()",
        _WIRES,
    ),
    Mutant(
        "blocks begin anywhere in a flat buffer",
        "sharding/wires.py",
        "return max([ALIGNMENT, *(codec.block for codec in of_groups if codec is not None)])",
        "return ALIGNMENT",
        _WIRES,
    ),
    Mutant(
        "frozen weights travel in the codec of trained ones",
        "sharding/wires.py",
        "(self.weights if trainable else self.frozen) if gathers else None",
        "self.weights if gathers else None",
        _WIRES,
    ),
    Mutant(
        "what a write leaves as it was is rounded as it arrived",
        "sharding/resting_weights.py",
        "torch.where(new == arrives(into.to(new.dtype)), into,",
        "torch.where(new == into.to(new.dtype), into,",
        _WIRES,
    ),
    Mutant(
        "a second copy is made of decoded weights",
        "sharding/hpz.py",
        "        if self._codec is not None:\n            self._part.copy_(self._own(wire))\n",
        "        if self._codec is not None:\n            self._part.copy_(self._own(wire).flip(0))\n",
        _WIRES,
    ),
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
