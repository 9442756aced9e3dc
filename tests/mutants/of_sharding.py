"""Faults in `sharding` and `optim`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: list[Mutant] = [
    # ---- gradients of a window
    Mutant(
        "a second gradient of a window is not divided by the ranks of the experts",
        "sharding/window_gradient.py",
        "into.add_(grad, alpha=self._factor)",
        "into.add_(grad)",
        ("sharding/test_window_gradient.py",),
    ),
    Mutant(
        "a parameter that only an earlier microbatch used counts as unused",
        "sharding/window_gradient.py",
        "                set_raw_grad(p, None)\n                self.used[i] = True\n",
        "                set_raw_grad(p, None)\n",
        ("sharding/test_user_loops.py", "sharding/test_edge.py"),
    ),
    Mutant(
        "a gradient set to None stays in the norm",
        "sharding/gradient_access.py",
        "                group.grad[start:stop].zero_()\n",
        "                group.grad[start:start].zero_()\n",
        ("window/test_raw_loops.py",),
    ),
    Mutant(
        "the largest element of a sharded gradient is added up over the ranks",
        "sharding/gradient_shard.py",
        'op="max" if is_max else "sum").wait()',
        'op="sum").wait()',
        ("window/test_raw_loops.py",),
    ),
    Mutant(
        "a second backward of a unit in one pass is not reduced",
        "sharding/reducer.py",
        "if self.reduces(unit.index) and any(g.window.has_some for g in unit.trainable):",
        "if unit.index not in self.order.seen and any(g.window.has_some for g in unit.trainable):",
        ("sharding/test_families.py", "sharding/test_edge.py"),
    ),
    Mutant(
        "a window whose backwards were all announced as not the last is not reduced",
        "sharding/reducer.py",
        "self._unfinished.add(index)",
        "self._unfinished.discard(index)",
        ("window/test_order_of_calls.py", "window/test_raw_loops.py"),
    ),
    # ---- axes
    Mutant(
        "copies along a second axis are counted in the norm again",
        "sharding/group_axes.py",
        "return all(row.axis.rank == 0 for row in self.then)\n",
        "return all(row.axis.rank == 0 for row in self.then[:1])\n",
        ("parity/test_new_axis.py",),
    ),
    # ---- weights
    Mutant(
        "what user code writes into weights inside a forward is freed with them",
        "sharding/group.py",
        "        self.take_writes()\n        if self.second",
        "        if self.second",
        ("window/test_raw_loops.py",),
    ),
    Mutant(
        "a second copy is made of weights that were loaded over since",
        "sharding/group.py",
        "if self.second is not None and self._keepable:",
        "if self.second is not None and self.fresh:",
        ("sharding/test_second_copy.py",),
    ),
    Mutant(
        "writes are noticed in the first parameter of a group only",
        "sharding/user_writes.py",
        "return sum(p._version for p in self._params)",
        "return self._params[0]._version",
        ("window/test_raw_loops.py", "sharding/test_full_params.py"),
    ),
    Mutant(
        "copies of a shard do not take the changes of the rank that wrote",
        "sharding/full_params.py",
        "for axis in (group.axes.shard, *copies):",
        "for axis in (group.axes.shard,):",
        ("offload/test_parity.py::test_hsdp_clipped_values_and_weights_changed_by_one_rank",),
    ),
    Mutant(
        "a full gradient lacks the parts of the ranks that share a weight",
        "sharding/full_params.py",
        "for row in group.access.to_combine():",
        "for row in group.access.to_combine()[1:]:",
        ("tensor/test_properties.py",),
    ),
    # ---- passes
    Mutant(
        "a block is freed before the gradients of its inputs are there",
        "sharding/passes.py",
        "if unit.waiting or unit.open_calls:",
        "if unit.waiting:",
        ("sharding/test_edge.py", "hf/test_peft.py"),
    ),
    Mutant(
        "gradients of a backward that raised are added to the next window",
        "sharding/passes.py",
        "        if self._in_backward:  # the last backward raised; its gradients belong to no step\n"
        "            self._abandon_window()",
        "        if self._in_backward:  # the last backward raised; its gradients belong to no step\n"
        "            self._end_backward()",
        ("window/test_raw_loops.py",),
    ),
    Mutant(
        "frozen weights of the root are freed with the gradient of its last trained one",
        "sharding/unit.py",
        "self.frees_early = not self.is_root or all(g.trainable for g in self.groups)",
        "self.frees_early = True",
        ("sharding/test_edge.py", "hf/test_peft.py"),
    ),
    Mutant(
        "units that the first rank did not see are in no common order",
        "sharding/order.py",
        "for order in dict.fromkeys(map(tuple, orders)):",
        "for order in [tuple(orders[0])]:",
        ("sharding/test_order.py",),
    ),
    # ---- the model
    Mutant(
        "a module whose name only begins like a unit's counts as part of the unit",
        "sharding/units.py",
        'owner.startswith(path + ".")',
        "owner.startswith(path)",
        ("sharding/test_units.py", "sharding/test_edge.py"),
    ),
    Mutant(
        "buffers that differ between ranks from the start stay different",
        "sharding/consistency.py",
        "for n, t in (*model.named_parameters(), *model.named_buffers()) if",
        "for n, t in model.named_parameters() if",
        ("sharding/test_statistics.py",),
    ),
    Mutant(
        "statistics of every pipeline stage are taken from the first one",
        "sharding/buffers.py",
        "next((s for s, c in enumerate(ran) if n in c), 0)",
        "0",
        ("sharding/test_statistics.py::test_statistics_of_every_stage_are_saved_from_the_first_data_rank",),
    ),
    Mutant(
        "masters of weights kept in fp32 are as narrow as the others",
        "sharding/precision.py",
        "return MASTER_DTYPE if compute == torch.float32 else self.masters",
        "return self.masters",
        ("optim/test_rounded.py",),
    ),
    Mutant(
        "what lies inside a nested target is cast like an input",
        "sharding/targets.py",
        "cast(item, as_given or (type(key)",
        "cast(item, (type(key)",
        ("sharding/test_targets.py",),
    ),
    Mutant(
        "a weight whose file could not be read stays half filled",
        "sharding/lazy.py",
        "storage.resize_(0)  # stay lazy",
        "pass  # stay lazy",
        ("loading/test_user_code.py",),
    ),
    # ---- norms and clipping
    Mutant(
        "the parameters with a gradient are those of the first step",
        "optim/clip.py",
        "if before is None or before[0] != flags:",
        "if before is None:",
        ("sharding/test_edge.py", "optim/test_whole.py"),
    ),
    Mutant(
        "the norm of some parameters counts elements that every rank holds on each of them",
        "optim/clip.py",
        "part = group.grad[max(start, first) : max(min(stop, last), start, first)]",
        "part = group.grad[start:stop]",
        ("window/test_order_of_calls.py", "window/test_raw_loops.py"),
    ),
    Mutant(
        "a resumed loss scale has all its overflows left",
        "optim/loss_scale.py",
        'self._overflows_left = int(state["overflows_left"])',
        "self._overflows_left = self._hysteresis",
        ("optim/test_loss_scale.py",),
    ),
    # ---- the step
    Mutant(
        "the rate of the first step stays for states on the host",
        "optim/attach.py",
        "        self._stepped.clear()\n        self._narrowed = None\n",
        "        self._stepped.clear()\n",
        ("offload/test_parity.py",),
    ),
    Mutant(
        "a full batch of states on the host is stepped again with the next one",
        "optim/step_batch.py",
        "for f in own_of[id(g)]]))\n                on_host = []\n",
        "for f in own_of[id(g)]]))\n",
        ("offload/test_parity.py", "optim/test_fused_kernel.py"),
    ),
    Mutant(
        "weights without a gradient are stepped inside the backward",
        "optim/in_backward.py",
        "        if not all(group.window.used):\n            return\n",
        "",
        ("optim/test_in_backward.py",),
    ),
    Mutant(
        "states are saved at the place that they have in the shard",
        "optim/fragment.py",
        "return self.group.resting[0] + self.start - self.slot.offset",
        "return max(0, self.start - self.slot.offset)",
        ("checkpoint/test_resume_grid.py", "sharding/test_edge.py"),
    ),
    Mutant(
        "only the options of the first param group are probed",
        "optim/stepping.py",
        "for options in distinct.values():",
        "for options in list(distinct.values())[:1]:",
        ("optim/test_stepping.py",),
    ),
    Mutant(
        "all matrices of a batch are stepped by the first one's part of the weights",
        "optim/owners.py",
        "first = self.slot.offset + self.start + start - self.group.resting[0] - begins",
        "first = self.slot.offset + start - self.group.resting[0] - begins",
        ("parity/test_grid.py",),
    ),
    Mutant(
        "Adafactor's factors of a batch of matrices share one mean",
        "optim/adafactor.py",
        "row / row.mean(dim=-1, keepdim=True)",
        "row / row.mean()",
        ("optim/test_build.py", "optim/test_whole.py"),
    ),
    Mutant(
        "Lamb moves weights that are zero by the smallest ratio",
        "optim/lamb.py",
        "torch.where((length > 0) & (norm > 0), ratio",
        "torch.where(norm > 0, ratio",
        ("parity/test_grid.py",),
    ),
    Mutant(
        "states are rounded where only master weights rest in bf16",
        "optim/rounded.py",
        "if self._rounding.states and f.is_like(value)",
        "if f.is_like(value)",
        ("optim/test_rounded.py::test_master_weights_rest_in_bf16_and_are_stepped_in_fp32",),
    ),
    Mutant(
        "betas of a cycle are those of its beginning after a resume",
        "optim/cycles.py",
        "        super().load_state_dict(state_dict)\n        self._set_betas()\n",
        "        super().load_state_dict(state_dict)\n",
        ("optim/test_schedules.py",),
    ),
    Mutant(
        "a step that was skipped leaves its flag to the next",
        "optim/step_scaling.py",
        "            for name in _GIVEN:\n                vars(optimizer)",
        "            for name in _GIVEN[:1]:\n                vars(optimizer)",
        ("optim/test_step_scaling.py",),
    ),
]
