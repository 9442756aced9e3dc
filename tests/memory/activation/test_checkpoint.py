"""Activation checkpointing in one process: bitwise the same numbers, and exactly the bytes that it promises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import library
from torch.autograd.graph import saved_tensors_hooks

from hf_dist.config import DistConfig, load_config
from hf_dist.errors import ConfigError, ModelError
from hf_dist.memory.activation import describe_checkpointing, set_up_checkpointing
from hf_dist.memory.activation.checkpoint import BlockCheckpoint
from hf_dist.memory.activation.host_copies import NUM_KEPT, HostCopies
from hf_dist.memory.activation.tiled_mlp import tile_mlps
from tests.memory.activation.families import LENGTH, make_batch, make_model

ROWS, LAYERS, HIDDEN = 6, 5, 32
INPUT_BYTES = ROWS * LENGTH * HIDDEN * 4


def config(**section: Any) -> DistConfig:
    return load_config({"activation_checkpointing": section})


def deep(family: str = "llama", **changes: Any) -> Any:
    return make_model(family, **{"num_hidden_layers" if family != "gpt2" else "n_layer": LAYERS, **changes})


def run(model: Any, steps: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and the last gradients of some steps with the same random numbers."""
    torch.manual_seed(7)
    model.config.use_cache = False  # what a checkpointed block does; a cache stores keys in another memory layout
    losses = []
    for step in range(steps):
        model.zero_grad()
        loss = model(**make_batch(ROWS, seed=step)).loss
        loss.backward()
        losses.append(float(loss))
    return losses, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: Any, wanted: Any) -> None:
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    assert [n for n in wanted[1] if not torch.equal(found[1][n], wanted[1][n])] == []


SECTIONS = {
    "every block": {"every_n_layers": 1},
    "every second": {"every_n_layers": 2},
    "every third": {"every_n_layers": 3},
    "on the host": {"cpu_checkpointing": True},
    "second on the host": {"every_n_layers": 2, "cpu_checkpointing": True},
    "selective": {"selective": True},
    "selective on the host": {"selective": True, "cpu_checkpointing": True},
}
DROPOUT = {"llama": {"attention_dropout": 0.2}, "gpt2": dict(resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.2)}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_losses_and_gradients_are_bitwise_equal_with_dropout(section: dict[str, Any], family: str) -> None:
    wanted = run(deep(family, **DROPOUT[family]))
    model = deep(family, **DROPOUT[family])
    set_up_checkpointing(model, config(**section))
    assert_same(run(model), wanted)


@pytest.mark.parametrize("section", [{"every_n_layers": 1}, {"cpu_checkpointing": True}, {"selective": True}], ids=str)
@pytest.mark.parametrize("kind", ["lora", "frozen"])
def test_lora_and_frozen_blocks_need_no_other_switch(kind: str, section: dict[str, Any]) -> None:
    def make() -> Any:
        model = deep()
        if kind == "frozen":
            model.model.embed_tokens.requires_grad_(False)
            for layer in model.model.layers[:3]:
                layer.requires_grad_(False)
            return model
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        chosen = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, init_lora_weights=False)
        return get_peft_model(model, chosen)

    wanted = run(make())
    model = make()
    set_up_checkpointing(model, config(**section))
    assert_same(run(model), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_transformers_was_told_is_kept(reentrant: bool) -> None:
    wanted = run(deep())
    model = deep()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant}, every_n_layers=2)
    set_up_checkpointing(model, config(cpu_checkpointing=True))
    function = model.model.layers[0]._gradient_checkpointing_func
    assert isinstance(function, BlockCheckpoint) and function.keywords == {"use_reentrant": reentrant}
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, True, False, True]
    assert_same(run(model), wanted)
    model.gradient_checkpointing_enable(offload=True)  # HF's own offload, on its compute stream
    set_up_checkpointing(model, DistConfig())
    assert model.model.layers[0]._gradient_checkpointing_func.host_copies is not None
    set_up_checkpointing(model, DistConfig())  # as a second `train()` does
    assert_same(run(model), wanted)


def test_an_empty_section_changes_nothing() -> None:
    model = deep()
    set_up_checkpointing(model, DistConfig())
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    assert describe_checkpointing(model) == []


def saved_bytes(model: Any) -> dict[tuple[int, ...], int]:
    """Bytes that autograd holds from forward to backward outside of weights, by storage, as shape -> bytes."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(**{k: v for k, v in make_batch(ROWS).items() if k != "labels"})
    total: dict[tuple[int, ...], int] = {}
    for tensor in found.values():
        shape = tuple(tensor.shape)
        total[shape] = total.get(shape, 0) + tensor.untyped_storage().nbytes()
    return total


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_checkpointed_block_keeps_its_input_and_nothing_else(every: int) -> None:
    wide = (ROWS, LENGTH, 56)  # only blocks that are not checkpointed keep tensors of the MLP's width
    plain = saved_bytes(deep())[wide]
    model = deep()
    set_up_checkpointing(model, config(every_n_layers=every))
    kept = LAYERS - len(range(0, LAYERS, every))
    assert saved_bytes(model).get(wide, 0) == plain // LAYERS * kept


def test_the_host_holds_the_inputs_of_all_blocks_and_the_device_those_of_two() -> None:
    model = deep()
    set_up_checkpointing(model, config(cpu_checkpointing=True))
    copies: HostCopies = model.model.layers[0]._gradient_checkpointing_func.host_copies
    live: list[int] = []
    put = HostCopies.put

    def counted(self: HostCopies, tensor: torch.Tensor) -> Any:
        copy = put(self, tensor)
        live.append(sum(c is not None and c.source is not None for c in (r() for r in self._latest)))
        return copy

    HostCopies.put = counted  # type: ignore[method-assign]
    try:
        for _ in range(3):  # buffers are used again
            loss = model(**make_batch(ROWS)).loss
            assert copies.nbytes == LAYERS * INPUT_BYTES
            assert all(not pool for pool in copies._pools.values())
            loss.backward()
            del loss
            assert [len(pool) for pool in copies._pools.values()] == [LAYERS]
    finally:
        HostCopies.put = put  # type: ignore[method-assign]
    assert live == [1, *[NUM_KEPT] * (LAYERS - 1)] * 3


def test_selective_checkpointing_runs_no_matrix_product_twice() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def flops(**section: Any) -> int:
        model = deep()
        set_up_checkpointing(model, config(**section))
        with FlopCounterMode(display=False) as counter:
            model(**make_batch(ROWS)).loss.backward()
        return int(counter.get_total_flops())

    kept, selective, all_again = flops(), flops(selective=True), flops(every_n_layers=1)
    assert selective == kept < all_again


@library.custom_op("testing::attention", mutates_args=())
def drawing_attention(hidden: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Stands for the kernels of GPUs, which draw their dropout themselves."""
    return hidden * torch.empty_like(hidden).bernoulli_(1 - dropout_p) if dropout_p else hidden.clone()


drawing_attention.register_autograd(lambda ctx, grad: (grad, None))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_follows_an_attention_kernel_with_dropout_draws_the_same_again(dropout: float) -> None:
    def gradient(call: Any) -> torch.Tensor:
        def block(hidden: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(drawing_attention(hidden, dropout).sin(), 0.5)

        torch.manual_seed(3)
        hidden = torch.randn(9, 8, requires_grad=True)
        call(block, hidden).sum().backward()
        assert hidden.grad is not None
        return hidden.grad

    assert torch.equal(gradient(BlockCheckpoint({}, selective=True)), gradient(lambda block, hidden: block(hidden)))


def test_inputs_come_back_from_the_host_in_their_own_dtype() -> None:
    plain, model = deep(), deep()
    set_up_checkpointing(model, config(cpu_checkpointing=True))
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        assert_same(run(model.to(dtype)), run(plain.to(dtype)))


def test_tiles_of_an_mlp_that_run_again_drop_what_they_dropped() -> None:
    model = deep("gpt2", **DROPOUT["gpt2"])
    mlp = model.transformer.h[0].mlp
    hidden = torch.randn(3, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))

    def derivatives(forward: Any) -> list[torch.Tensor]:
        torch.manual_seed(7)
        start = hidden.clone().requires_grad_()
        out = forward(start)
        found = torch.autograd.grad(out.square().sum(), [start, *mlp.parameters()])
        return [out, *found, torch.rand(3)]

    wanted = derivatives(
        lambda start: torch.cat([mlp(tile.contiguous()) for tile in start.tensor_split(4, dim=1)], dim=1)
    )
    tile_mlps(model, 4)
    for got, want in zip(derivatives(mlp), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_in_bf16_many_tiles_of_an_mlp_are_as_near_to_fp32_as_the_whole() -> None:
    mlp = deep().model.layers[0].mlp
    model = torch.nn.ModuleDict({"mlp": mlp})
    hidden = torch.randn(2, 256, HIDDEN, generator=torch.Generator().manual_seed(1)).add(1)

    def weights() -> list[torch.Tensor]:
        out = mlp(hidden.to(mlp.up_proj.weight.dtype)).float()
        return [grad.float() for grad in torch.autograd.grad(out.square().sum(), list(mlp.parameters()))]

    truth = weights()
    model.bfloat16()
    whole = weights()
    tile_mlps(model, 256)
    for exact, one, many in zip(truth, whole, weights(), strict=True):
        assert float((many - exact).norm()) < 1.05 * float((one - exact).norm())


def test_backward_may_run_twice_over_what_rests_on_the_host() -> None:
    model = deep()
    set_up_checkpointing(model, config(cpu_checkpointing=True))
    loss = model(**make_batch(ROWS)).loss
    loss.backward(retain_graph=True)
    once = {n: p.grad.clone() for n, p in model.named_parameters()}
    loss.backward()
    assert all(torch.equal(p.grad, 2 * once[n]) for n, p in model.named_parameters())


def test_two_forwards_before_one_backward() -> None:
    def both(model: Any) -> Any:
        (model(**make_batch(ROWS, seed=1)).loss + model(**make_batch(3, seed=2)).loss).backward()
        return [0.0], {n: p.grad for n, p in model.named_parameters()}

    wanted = both(deep())
    model = deep()
    set_up_checkpointing(model, config(cpu_checkpointing=True))
    assert_same(both(model), wanted)


def test_a_copied_model_has_buffers_of_its_own() -> None:
    model = deep()
    set_up_checkpointing(model, config(cpu_checkpointing=True))
    twin = copy.deepcopy(model)
    first, second = (m.model.layers[0]._gradient_checkpointing_func.host_copies for m in (model, twin))
    assert second is not None and second is not first
    assert twin.model.layers[1]._gradient_checkpointing_func.host_copies is second
    assert_same(run(twin), run(model))


def test_the_report_says_what_happens() -> None:
    model = deep()
    set_up_checkpointing(model, config(every_n_layers=2, cpu_checkpointing=True, selective=True))
    assert describe_checkpointing(model) == [
        "3 of 5 blocks run again in backward",
        "inputs of these blocks rest on the host",
        "outputs of matrix products and attention are kept",
    ]


def test_pipelines_interval_means_every_nth_block_too() -> None:
    model = deep()
    set_up_checkpointing(model, load_config({"pipeline": {"activation_checkpoint_interval": 2}}))
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, True, False, True]


def test_contradictions_are_named() -> None:
    with pytest.raises(ConfigError, match=r"every_n_layers: 3 contradicts \"activation_checkpoint_interval\" 2"):
        load_config(
            {"activation_checkpointing": {"every_n_layers": 3}, "pipeline": {"activation_checkpoint_interval": 2}}
        )
    model = deep()
    model.gradient_checkpointing_enable(every_n_layers=2)
    with pytest.raises(ConfigError, match="every_n_layers: 3 differs from the model, where 3 of 5 blocks"):
        set_up_checkpointing(model, config(every_n_layers=3))
    model = deep()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ConfigError, match="selective: true contradicts use_reentrant in gradient_checkpointing_kwargs"):
        set_up_checkpointing(model, config(selective=True))
    with pytest.raises(ModelError, match="asks for activation checkpointing, but Linear has none"):
        set_up_checkpointing(torch.nn.Linear(2, 2), config(cpu_checkpointing=True))


def test_a_function_that_somebody_else_put_there_stays(caplog: pytest.LogCaptureFixture) -> None:
    def theirs(function: Any, *args: Any) -> Any:
        return function(*args)

    model = deep()
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=theirs)
    with caplog.at_level("WARNING", logger="hf_dist"):
        set_up_checkpointing(model, config(cpu_checkpointing=True))
    assert model.model.layers[0]._gradient_checkpointing_func is theirs
    assert "the model brings its own checkpoint function" in caplog.text
