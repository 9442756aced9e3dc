"""Faults in `tensor_parallel`, `sequence`, `experts`, and in the mesh and its collectives."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: list[Mutant] = [
    # ---- axes, groups, mesh, collectives
    Mutant(
        "shards inside of a sequence leave too many copies",
        "dist/axes.py",
        '"dp_replicate": ranks // max(shard, cp)',
        '"dp_replicate": ranks // shard',
        ("dist/test_axes.py",),
    ),
    Mutant(
        "groups end before what is on its way has arrived",
        "dist/groups.py",
        "    _settle(under_way)\n    while groups",
        "    under_way.clear()\n    while groups",
        ("dist/test_collectives.py",),
    ),
    Mutant(
        "a replica that trains alone averages over a shard only, not over the whole sequence",
        "dist/mesh.py",
        'dp = self.views["shard"] if self.axes.size("cp_replicate") == 1 else self.cp',
        'dp = self.views["shard"]',
        ("parallel/local_sgd/test_parity.py",),
    ),
    Mutant(
        "a proof that was overheard opens the door again",
        "dist/door.py",
        "os.urandom(_NONCE), time.monotonic()",
        "bytes(_NONCE), time.monotonic()",
        ("remote/test_door.py",),
    ),
    Mutant(
        "the door's own proof is taken for a visitor's",
        "dist/secret.py",
        'who + b"\\0" + said',
        "said",
        ("remote/test_door.py",),
    ),
    Mutant(
        "strangers that say nothing are as many as they like",
        "dist/door.py",
        "if len(self._strangers) >= _AT_ONCE:",
        "if len(self._strangers) >= 10 * _AT_ONCE:",
        ("remote/test_door.py",),
    ),
    Mutant(
        "a role of another job leaves the objects of one visit to the next",
        "remote/visits.py",
        "        server, (calls, release) = Server(place, mesh, visit), answers()",
        '        made = answers.__dict__.setdefault("made", answers())\n'
        "        server, (calls, release) = Server(place, mesh, visit), made",
        ("remote/test_jobs.py",),
    ),
    Mutant(
        "a server applies a movement whole, not its part of a mean",
        "parallel/local_sgd/delayed_nesterov.py",
        "self.weights.sub_(moved, alpha=self._rate / self.round)",
        "self.weights.sub_(moved, alpha=self._rate)",
        ("parallel/local_sgd/test_server_rules.py",),
    ),
    Mutant(
        "a server counts a push of which another rank has no part",
        "parallel/local_sgd/server.py",
        "if guest is None or not all(here for here, _, _ in everyone):",
        "if guest is None or not is_here:",
        ("parallel/local_sgd/test_server.py",),
    ),
    Mutant(
        "a server takes a movement from before the weights it began again with",
        "parallel/local_sgd/server.py",
        'fits = header["lineage"] == self._lineage',
        'fits = header["lineage"] <= self._lineage',
        ("parallel/local_sgd/test_server_rules.py",),
    ),
    Mutant(
        "a replica that meets a server reads all rows",
        "hf/replicas.py",
        "with self.accelerator.shared_by_replicas() if dist is not None else nullcontext():",
        "with nullcontext():",
        ("parallel/local_sgd/test_server.py",),
    ),
    Mutant(
        "gradients are summed in the dtype that travels, not in the wider one",
        "dist/collectives.py",
        """        out.copy_(full.narrow(0, axis.rank * part, part))
        for step in range(axis.size - 1):
            out.add_(received.narrow(0, step * part, part))
""",
        """        total = full.narrow(0, axis.rank * part, part).clone()
        for step in range(axis.size - 1):
            total.add_(received.narrow(0, step * part, part))
        out.copy_(total)
""",
        ("dist/test_collectives.py::test_values_and_bytes", "sharding/test_precision.py"),
    ),
    Mutant(
        "a second wait for a sum of two ranks adds once more",
        "dist/collectives.py",
        "works, finish, self._works, self._finish = self._works, self._finish, [], None",
        "works, finish, self._works = self._works, self._finish, []",
        ("dist/test_collectives.py::test_values_and_bytes",),
    ),
    # ---- random numbers, rows, agreement
    Mutant(
        "a rank stays in its own stream after a recomputation that stopped early",
        "tensors/random_streams.py",
        "return self._alike is not None and torch.initial_seed() == self._seed",
        "return self._alike is not None",
        ("parallel/tensor/test_dropout.py",),
    ),
    Mutant(
        "rows are compared along the first axis only",
        "dist/batch_consistency.py",
        "        for axis in axes:\n            _compare_along",
        "        for axis in axes[:1]:\n            _compare_along",
        (
            "parallel/sequence/test_refusals.py::test_ranks_with_other_rows_are_told_whichever_axis_is_between_them",
            "hf/test_layouts_in_trainer.py::test_a_rank_that_reads_other_data_is_named",
        ),
    ),
    Mutant(
        "an interrupt is not told to the other ranks",
        "dist/raise_on_all_ranks.py",
        'first_problem(self.axis, f"it was interrupted ({type(raised).__name__})")',
        "pass",
        ("dist/test_raise_on_all_ranks.py",),
    ),
    # ---- tensor parallelism
    Mutant(
        "ranks that share a head of keys take the mean of its gradient, not the sum",
        "parallel/tensor_on_shards.py",
        'found[name] = ("sum", split.kept[name].sharing)',
        'found[name] = ("mean", split.kept[name].sharing)',
        ("parallel/tensor/test_layouts.py::test_equals_one_process[tp4-z1-sequence]",),
    ),
    Mutant(
        "a stage cuts and joins the sequence at the ends of its own blocks",
        "parallel/tensor_on_shards.py",
        "for name in find_unit_modules(model if whole is None else whole)}",
        "for name in find_unit_modules(model)}",
        ("planning/test_mixed_traffic.py", "parity/test_pipeline.py"),
    ),
    Mutant(
        "the second factor of adapters on row products is not summed",
        "parallel/tensor/split.py",
        'return rest.startswith("A." if style in COLUMN else "B.") and style in (COLUMN | ROW)',
        'return rest.startswith("A.") and style in COLUMN',
        ("parallel/tensor/test_layouts.py::test_equals_one_process[tp4-z3-lora-checkpointing]",),
    ),
    Mutant(
        "a block that runs again takes the length of the latest forward",
        "parallel/tensor/sequence.py",
        "        self._length = found[1]\n",
        "",
        (
            "parallel/tensor/test_properties.py::test_forwards_of_two_lengths_run_again_in_one_backward[lengths, own code]",
        ),
    ),
    Mutant(
        "after a forward without gradients, blocks that run again keep whole sequences",
        "parallel/tensor/sequence.py",
        "            self._depth, self._plain = 0, False",
        "            self._depth = 0",
        (
            "parallel/tensor/test_properties.py::test_a_forward_without_gradients_leaves_the_blocks_that_run_again_as_they_were",
            "parallel/tensor/test_layouts.py",
        ),
    ),
    Mutant(
        "a sequence that does not divide is not padded before an early sum",
        "parallel/tensor/tp_collectives.py",
        "return peers.start_scatter_sum(padded(tensor, 1, _up(extra, peers.size)), 1)",
        "return peers.start_scatter_sum(tensor, 1)",
        ("parallel/tensor/test_overlap.py",),
    ),
    Mutant(
        "sums that begin early are split under autocast, too",
        "parallel/tensor/overlap.py",
        "if due is None or torch.is_autocast_enabled(self.tensor.device.type):",
        "if due is None:",
        (
            "parallel/tensor/test_overlap.py::test_under_autocast_the_losses_are_those_of_a_sum_behind_the_weight_gradients",
            "hf/test_autocast.py",
        ),
    ),
    Mutant(
        "a gathered head is kept for the next forward",
        "parallel/tensor/head.py",
        "        if not self._depth:\n            self._gathered.clear()",
        "        if self._depth:\n            self._gathered.clear()",
        ("parallel/tensor/test_fused_losses.py",),
    ),
    Mutant(
        "heads of keys are dealt in turn, not to neighbours",
        "parallel/tensor/slices.py",
        "first = rank // sharing * width",
        "first = rank % heads * width",
        ("parallel/tensor/test_plans.py",),
    ),
    Mutant(
        "a plan that was made for another partition_config is used again",
        "parallel/tensor/choose.py",
        "        repr(given),\n",
        "        given is None,\n",
        ("parallel/tensor/test_partition.py",),
    ),
    Mutant(
        "ranks without the row of the padding take another row for it",
        "parallel/tensor/sizes.py",
        "if first <= base.padding_idx < last else None",
        "if base.padding_idx < last else None",
        (
            "parallel/sequence/test_parity.py::test_four_ranks_of_which_some_share_sequences_equal_one_process",
            "parity/test_mixed.py",
        ),
    ),
    Mutant(
        "routing weights outside of regions get the gradient of a rank's own rows only",
        "parallel/tensor/whole_experts.py",
        "return (change(rows, peers), _own(chosen, peers), change(weights, peers)), {}",
        "return (change(rows, peers), _own(chosen, peers), _own(weights, peers)), {}",
        ("parallel/experts/test_spread.py",),
    ),
    # ---- sequences
    Mutant(
        "packed rows of recomputed blocks are not kept apart",
        "parallel/sequence/split.py",
        'if module.training and any(getattr(m, "gradient_checkpointing", False) for m in module.modules()):',
        "if False:",
        (
            "parallel/sequence/test_layers.py::test_two_ranks_that_share_sequences_equal_one_process[qwen3next-auto-z3-cp2-checkpointing]",
            "parallel/sequence/test_parity.py::test_two_ranks_that_share_sequences_equal_one_process",
        ),
    ),
    Mutant(
        "packed documents are looked for beside a mask, too",
        "parallel/sequence/inputs.py",
        "if is_given and mask is None and documents_of is not None:",
        "if is_given and documents_of is not None:",
        ("parallel/sequence/test_bits.py",),
    ),
    Mutant(
        "a kernel that knows causal attention by itself gets no mask of packed documents",
        "parallel/sequence/attention.py",
        'forward.documents)\n        kwargs["allow_is_causal_skip"] = False\n',
        "forward.documents)\n",
        ("parallel/sequence/test_bits.py",),
    ),
    Mutant(
        "a single query of the first rank sees every key, as HF's last one does",
        "parallel/sequence/attention.py",
        "    if q_length == 1:  # HF",
        "    if q_length == 0:  # HF",
        ("parallel/sequence/test_parity.py",),
    ),
    Mutant(
        "a recomputed block takes the relative biases of a row as long as its part",
        "parallel/sequence/pairs.py",
        "if axes is None or (current() is None and not in_backward()):",
        "if axes is None or current() is None:",
        ("parallel/sequence/test_layers.py",),
    ),
    Mutant(
        "gradients of keys travel round the ring in half precision",
        "parallel/sequence/ring.py",
        "travelling = torch.zeros(key.numel() + value.numel(), dtype=wide, device=key.device)",
        "travelling = torch.zeros(key.numel() + value.numel(), dtype=key.dtype, device=key.device)",
        ("parallel/sequence/test_accounting.py::test_bytes_along_the_axis_equal_the_formula",),
    ),
    Mutant(
        "positions that a ring has added get the gradient of the last token",
        "parallel/sequence/exchange.py",
        "            own = own * is_there.view(1, -1, *[1] * (own.dim() - 2))\n",
        "",
        ("parallel/sequence/test_parity.py::test_two_ranks_that_share_sequences_equal_one_process",),
    ),
    Mutant(
        "heads that share groups unevenly are counted as if evenly",
        "parallel/sequence/mixers.py",
        "return distinct if len(set(counts.tolist())) == 1 else of_each",
        "return distinct",
        (
            "parallel/sequence/test_layers.py::test_two_ranks_that_share_sequences_equal_one_process[mamba2-groups-auto-z1-cp2]",
        ),
    ),
    Mutant(
        "a recomputed recurrence forgets the padding",
        "parallel/sequence/whole_rows.py",
        "ones if mask is None else mask.to(ones.dtype))",
        "ones)",
        (
            "parallel/sequence/test_layers.py::test_two_ranks_that_share_sequences_equal_one_process[mamba2-auto-z3-cp2-checkpointing]",
        ),
    ),
    Mutant(
        "rows of a ring are multiplied where the first one sees something",
        "parallel/sequence/ring_plan.py",
        "alike = all(found == by_row[0] for found in by_row)",
        "alike = bool(by_row)",
        ("parallel/sequence/test_ring_plan.py",),
    ),
    Mutant(
        "a model is compared on parts by the kernel of training",
        "parallel/sequence/verify.py",
        'split.attending_by("eager" if has_eager else "sdpa"):',
        "split.attending_by(split.kernel):",
        ("parallel/sequence/test_refusals.py",),
    ),
    Mutant(
        "a model stays in evaluation after its check, and drops nothing",
        "parallel/sequence/verify.py",
        "model.train(was_training)\n",
        "model.eval()\n",
        (
            "parallel/sequence/test_refusals.py::test_a_model_in_training_is_in_training_after_its_check",
            "parallel/sequence/test_accounting.py",
        ),
    ),
    Mutant(
        "what a model does to parts of a sequence is compared in bf16, which hides a hundredth",
        "parallel/sequence/verify.py",
        "if split.kernel in _IN_FP32:",
        "if not split.kernel:",
        ("parallel/sequence/test_refusals.py",),
    ),
    # ---- experts
    Mutant(
        "a recomputed forward routes again and counts its rows twice",
        "parallel/experts/exchange.py",
        "plan = kept(lambda: self._plan(chosen))",
        "plan = self._plan(chosen)",
        (
            "parallel/experts/test_spread.py::test_rows_of_blocks_that_run_again_count_once",
            "parallel/experts/test_life.py",
        ),
    ),
    Mutant(
        "the auxiliary loss of an evaluation is divided by the microbatches of a window",
        "parallel/experts/router_loss.py",
        "default = self.mesh.data.size * (self.accumulation if model.training else 1)",
        "default = self.mesh.data.size * self.accumulation",
        ("parallel/experts/test_router_loss.py::test_in_an_evaluation_it_is_no_part_of_a_window",),
    ),
    Mutant(
        "rows of the ranks that cut matrices are left out of the load",
        "parallel/experts/balance.py",
        "for among in (mesh.dp, mesh.tp):",
        "for among in (mesh.dp,):",
        ("parallel/experts/test_life.py",),
    ),
    Mutant(
        "an expert that the example did not reach is on the first stage",
        "parallel/pipeline/stage_plan.py",
        "        owners[names[0]] = around\n",
        "        owners[names[0]] = (0,)\n",
        ("parallel/pipeline/test_split.py",),
    ),
    # ---- what was not looked at when a layout was verified
    Mutant(
        "an output that differs on parts of a sequence may be read",
        "parallel/sequence/outputs.py",
        "            if key in parts:\n",
        "            if False:\n",
        ("parallel/sequence/test_whole_calls.py",),
    ),
    Mutant(
        "an argument that nobody has tried is cut by its shape",
        "parallel/sequence/split.py",
        "            if self.verified is not None and is_rows and",
        "            if False and is_rows and",
        ("parallel/sequence/test_whole_calls.py",),
    ),
    Mutant(
        "a query without keys attends to the tokens that make the length divide",
        "parallel/sequence/attention.py",
        "        mask[..., real_length:] = -torch.inf\n",
        "",
        ("parallel/sequence/test_whole_calls.py",),
    ),
    Mutant(
        "rows of embeddings count from 0",
        "parallel/sequence/inputs.py",
        "first = arguments.first_of_embeds if ids is None else 0",
        "first = 0",
        ("parallel/sequence/test_whole_calls.py",),
    ),
    Mutant(
        "a pooled token is that of the rank",
        "parallel/sequence/split.py",
        "return layers if _pools(region) and isinstance(layers, nn.Module) else region",
        "return region",
        ("parallel/sequence/test_whole_calls.py",),
    ),
    Mutant(
        "an id of nobody's row is another rank's",
        "parallel/tensor/products.py",
        "of_another = outside & (args[0] >= 0) & (args[0] < rows)",
        "of_another = outside",
        ("hf/test_refused.py",),
    ),
    Mutant(
        "an output of an earlier stage is zeros",
        "parallel/pipeline/stage_pass.py",
        "return AbsentOutput.of(value, self.model_name) if id(value) in self._stood_in else value",
        "return value",
        ("parallel/pipeline/test_split.py",),
    ),
    Mutant(
        "a received tensor does not reach the model's output",
        "parallel/pipeline/stage_pass.py",
        "            return self._replaced[id(value)][1]\n",
        "            return value\n",
        ("parallel/pipeline/test_parity.py",),
    ),
]
