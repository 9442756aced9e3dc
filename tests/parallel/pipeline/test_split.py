"""Probe and cut on small modules of our own: who owns what, what travels, and what is refused by name."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.parallel.pipeline import (
    Hooks,
    StagedModel,
    forward_only,
    make_plan,
    make_schedule,
    plan_stages,
    probe,
    simulate,
    verify,
)
from tests.parallel.pipeline.local import run_local, stage_models, summed_gradients
from tests.parallel.pipeline.zoo import make_microbatches
from tests.parallel.pipeline.zoo import make_model as make_hf_model

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        return x + y if extra is None else x + y * extra


class Net(nn.Module):
    """Embedding, blocks, a head; `kind` adds what makes a split hard."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(20, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.kind == "values":
            assert ids.max().item() > 1, "only true of real ids"
        x = first = self.embed(ids)
        side = self.side(x) if self.kind in ("same", "again", "sliced", "decision", "written") else None
        if self.kind == "written":
            side[:, 0] = ids[:, :1]  # type: ignore[index]
        noise = torch.rand(ids.shape[0], 1, WIDTH) if self.kind == "random" else None
        for index, block in enumerate(self.blocks):
            if self.kind in ("same", "written"):
                x = block(x, side)
            elif self.kind == "again":
                x = block(x, side if index % 2 == 0 else None)
            elif self.kind == "sliced":
                x = block(x, side[index])  # type: ignore[index]
            elif self.kind == "random":
                x = block(x, noise)
            elif self.kind == "loose":
                x = block(x, self.scale * (index + 1))
            elif self.kind == "past":
                x = x + block(x)
            else:
                x = block(x)
        if self.kind == "residual":
            x = x + first
        if self.kind == "decision" and bool(side.sum() > 0):  # type: ignore[union-attr]
            x = x * 2
        logits = self.head(x)
        more = {"embedded": first} if self.kind == "telling" else {}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits, **more}


def make_batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 20, (4, 3 + i), generator=g) for i in range(count)]
    return [{"ids": x, "labels": x.roll(1, 1)} for x in ids]


def make_net(kind: str) -> Net:
    torch.manual_seed(0)
    return Net(kind)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("kind", ["plain", "same", "again", "written", "loose", "past", "values"])
def test_what_passes_blocks_splits_exactly(kind: str, schedule: str, stages: int) -> None:
    net, batches = make_net(kind), make_batches()
    plan = plan_stages(net, batches[0], stages, method="uniform").plan
    assert plan.in_place == (kind == "past")
    steps = make_schedule(schedule, stages, len(batches))
    staged = stage_models(net, plan, steps)
    losses = run_local(staged, steps, batches, lambda m, b: m(**b)["loss"])
    expected = []
    for batch in batches:
        expected.append(net(**batch)["loss"])
        expected[-1].backward()
    assert [x.item() for x in losses] == [x.item() for x in expected]
    gradients = summed_gradients(staged)
    for name, param in net.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(gradients[name], param.grad, rtol=1e-6, atol=1e-8)


def test_each_stage_keeps_its_own_parameters_under_their_names() -> None:
    net = make_net("plain")
    plan = make_plan(probe(net, make_batches()[0]), (0, 1, 4))
    whole = dict(net.named_parameters())
    first, last = (
        dict(StagedModel(n, plan, (s,)).model.named_parameters()) for s, n in enumerate([net, make_net("plain")])
    )
    # `side`, `scale` and `spare` are not used: they rest with the first stage
    assert list(first) == ["scale", "embed.weight", "side.weight", "side.bias", "blocks.0.linear.weight",
                           "blocks.0.linear.bias", "spare.weight", "spare.bias"]  # fmt: skip
    assert set(first) | set(last) == set(whole) and not set(first) & set(last)
    assert all(param is whole[name] for name, param in first.items())
    assert sorted(net.state_dict()) == sorted(first)


def test_a_model_on_meta_is_split_before_it_has_memory() -> None:
    with torch.device("meta"):
        net = Net()
    plan = make_plan(probe(net, make_batches()[0]), (0, 2, 4))
    verify(net, plan, make_batches()[0])
    staged = StagedModel(net, plan, (1,))
    assert all(p.is_meta for p in staged.model.parameters()) and "embed.weight" not in dict(net.named_parameters())


def test_weights_may_be_loaded_after_the_split() -> None:
    whole, batches = make_net("same"), make_batches()
    with torch.device("meta"):
        nets = [Net("same") for _ in range(2)]
    plan = plan_stages(nets[0], batches[0], 2).plan
    staged = [StagedModel(net, plan, (stage,)) for stage, net in enumerate(nets)]
    for one in staged:
        state = {name: whole.state_dict()[name].clone() for name in one.model.state_dict()}
        one.model.load_state_dict(state, assign=True)
    losses = run_local(staged, make_schedule("1f1b", 2, 3), batches, lambda m, b: m(**b)["loss"])
    assert [x.item() for x in losses] == [whole(**b)["loss"].item() for b in batches]


def test_tied_parameters_say_which_stages_share_them() -> None:
    net = make_net("plain")
    net.head.weight = net.embed.weight
    (shared,) = make_plan(probe(net, make_batches()[0]), (0, 1, 2, 4)).shared
    assert shared.names == ("embed.weight", "head.weight") and shared.stages == (0, 2)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sliced", r"in stage 1 \(blocks.2 to blocks.3\) blocks.2 is given \[0\]\[1\]|depends|made from"),
        ("residual", r"in stage 1 \(blocks.2 to blocks.3\) the model's loss depends on values of an earlier stage"),
        ("decision", "asks for a value .* that depends on an earlier stage"),
    ],
)
def test_a_hidden_dependence_is_refused_with_stage_and_place(kind: str, message: str) -> None:
    net, batch = make_net(kind), make_batches()[0]
    plan = make_plan(probe(net, batch), (0, 2, 4))
    with pytest.raises(ModelError, match=message):
        verify(net, plan, batch)


def test_what_is_drawn_at_random_travels() -> None:
    net, batches = make_net("random"), make_batches()
    plan = make_plan(probe(net, batches[0]), (0, 2, 4))
    verify(net, plan, batches[0])
    assert plan.boundaries[0].paths == ("[0][0]", "[0][1]")
    drawn: list[torch.Tensor] = []
    steps = make_schedule("1f1b", 2, 3)
    staged = stage_models(net, plan, steps)
    for one in staged:
        one.model.blocks[3 if one is staged[1] else 0].linear.register_forward_pre_hook(lambda *a: None)  # type: ignore[union-attr, index]
        one.model.blocks[3 if one is staged[1] else 0].register_forward_pre_hook(lambda m, a: drawn.append(a[1]))  # type: ignore[union-attr, index]
    run_local(staged, steps, batches[:1] * 3, lambda m, b: m(**b)["loss"])
    assert len(drawn) == 6 and len({tuple(t.flatten().tolist()) for t in drawn}) == 3


def test_a_plan_describes_its_stages() -> None:
    net = make_net("plain")
    net.head.weight = net.embed.weight
    split = plan_stages(net, make_batches()[0], 2)
    lines = split.describe().splitlines()
    assert [line.split(" of the time")[0].rsplit(",", 1)[0] for line in lines[:2]] == [
        "stage 0: 3 blocks, blocks.0 to blocks.2",
        "stage 1: 1 block, blocks.3",
    ]
    assert " of the time, " in lines[0] and " of the time with the output layer, " in lines[1]
    assert lines[3] == "shared: embed.weight on stages 0, 1"
    assert sum(split.nbytes) == 4 * (sum(p.numel() for p in net.parameters()) + net.embed.weight.numel())


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_graphs_alive_are_those_the_simulation_counts(name: str) -> None:
    net, batches = make_net("plain"), make_batches(6)
    schedule = make_schedule(name, 2, 6)
    staged = stage_models(net, plan_stages(net, batches[0], 2).plan, schedule)
    alive: list[weakref.ref[torch.Tensor]] = []
    peak = 0

    class Count(Hooks):
        def after_forward(self, stage: int, microbatch: int) -> None:
            nonlocal peak
            peak = max(peak, sum(ref() is not None for ref in alive))

    # what the first block saves for backward lives as long as the graph of its microbatch
    staged[0].model.blocks[0].register_forward_hook(lambda m, a, out: alive.append(weakref.ref(out)))  # type: ignore[union-attr, index]
    run_local(staged, schedule, batches, lambda m, b: m(**b)["loss"], Count())
    assert peak == simulate(schedule).in_flight[0]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Linear cannot be split: none of its modules repeats"):
        probe(nn.Linear(3, 3), {"input": torch.rand(2, 3)})


def test_a_forward_that_needs_elements_is_refused_with_its_error() -> None:
    class Numpy(Net):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return super().forward(torch.from_numpy(ids.numpy()), labels)

    with pytest.raises(ModelError, match=r"Numpy cannot be split: its forward does not run without memory .*numpy"):
        probe(Numpy(), make_batches()[0])


def test_an_output_that_an_earlier_stage_did_not_send_raises_when_it_is_read() -> None:
    net, batches = make_net("telling").eval(), make_batches(2)
    plan, schedule = make_plan(probe(net, batches[0]), (0, 2, 4)), forward_only(2, 2)
    for output, batch in zip(
        run_local(stage_models(net, plan, schedule), schedule, batches, lambda m, b: m(**b)), batches, strict=True
    ):
        with torch.no_grad():
            torch.testing.assert_close(output["logits"], net(**batch)["logits"])
        assert output["embedded"].shape == (*batch["ids"].shape, WIDTH)
        with pytest.raises(ModelError, match="an output of Net was computed by an earlier stage"):
            output["embedded"].sum()


def test_what_the_example_did_not_reach_belongs_to_the_stage_of_its_module() -> None:
    net = make_net("plain")
    for block in net.blocks:
        block.expert = nn.Linear(WIDTH, WIDTH)  # other rows may be sent to it
    plan = make_plan(probe(net, make_batches()[0]), (0, 2, 4))
    owners = [plan.owners[f"blocks.{i}.expert.weight"] for i in range(4)]
    assert owners == [(0,), (0,), (1,), (1,)]
    assert plan.owners["spare.weight"] == (0,)


def test_another_path_than_the_example_is_an_error_not_a_wrong_result() -> None:
    net, batch = make_net("plain"), make_batches()[0]
    staged = StagedModel(net, make_plan(probe(net, batch), (0, 2, 4)), (0,))
    staged.forward(0, lambda m: m(**batch))
    net.kind = "loose"
    with pytest.raises(
        ModelError,
        match=r"a block call is blocks.0 with \[0\]\[1\], in the example batch it was blocks.0 with \[0\]\[0\]",
    ):
        staged.forward(0, lambda m: m(**batch))
    with pytest.raises(ModelError, match="stage 0 ended after 0 block calls instead of 3"):
        staged.forward(0, lambda m: m.embed(batch["ids"]))


def test_frozen_parts_send_no_gradient_back() -> None:
    model, batches = make_hf_model("Llama"), make_microbatches("Llama", 2)
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith(("model.layers.3", "model.norm", "lm_head")))
    plan = make_plan(probe(model, batches[0]), (0, 2, 4))
    verify(model, plan, batches[0])
    assert [s.requires_grad for s in plan.boundaries[0].specs] == [False]
    steps = make_schedule("1f1b", 2, 2)
    staged = stage_models(model, plan, steps)
    run_local(staged, steps, batches, lambda m, b: m(**b).loss)
    for batch in batches:
        model(**batch).loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients = summed_gradients(staged)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient)


def test_lora_on_a_frozen_model() -> None:
    from peft import LoraConfig, get_peft_model

    batches = make_microbatches("Llama", 2)
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0, init_lora_weights=False)
    model = get_peft_model(make_hf_model("Llama"), config).train()  # type: ignore[arg-type]
    plan = make_plan(probe(model, batches[0]), (0, 2, 4))
    verify(model, plan, batches[0])
    steps = make_schedule("zb_h1", 2, 2)
    staged = stage_models(model, plan, steps)
    run_local(staged, steps, batches, lambda m, b: m(**b).loss)
    for batch in batches:
        model(**batch).loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients = summed_gradients(staged)
    assert gradients.keys() == expected.keys() and len(expected) == 16
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-8)
