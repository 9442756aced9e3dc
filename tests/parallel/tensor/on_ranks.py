"""What a rank does in the tests of single properties: bytes on the wire, what is read of files, precision, user code."""

from __future__ import annotations

from typing import Any

import torch

LENGTH, ROWS, HIDDEN = 11, 3, 32


def llama(**fields: Any) -> Any:
    """Three blocks, two heads of keys and values, 101 tokens."""
    import transformers as tf

    torch.manual_seed(0)
    small = dict(hidden_size=HIDDEN, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=101)
    config = tf.LlamaConfig(**{**small, "intermediate_size": 56, "use_cache": False, **fields})
    return tf.LlamaForCausalLM(config).train()


def mixture() -> Any:
    """Two blocks of eight experts each, of which two are chosen."""
    import transformers as tf

    torch.manual_seed(0)
    config = tf.Qwen3MoeConfig(
        hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=101,
        intermediate_size=48, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return tf.Qwen3MoeForCausalLM(config).train()


def eager_mixture() -> Any:
    """The same with a loop over the experts."""
    model = mixture()
    model.set_experts_implementation("eager")
    return model


def engine_of(model: Any, size: int, **more: Any) -> Any:
    """SGD, no clipping."""
    import hf_dist

    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": size},
        **more,
    }
    return hf_dist.initialize(model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def batch() -> dict[str, torch.Tensor]:
    """Rows whose length divides by no number of ranks."""
    ids = torch.randint(1, 101, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids.clone()}


def wire(rank: int, world: int) -> dict[str, Any]:
    """Bytes and calls of one forward and backward, by operation, plain and with regions; over `tp` only."""
    from hf_dist.dist import comm_counter

    found = {}
    for name, regions in (("plain", False), ("regions", True)):
        engine = engine_of(llama(), world, hf_dist={"sequence_regions": regions, "tiled_loss": "auto"})
        for _ in range(2):
            with comm_counter.record() as log:
                loss = engine(**batch()).loss
                engine.backward(loss)
            engine.step()
        rows = [e for e in log.entries if e.axis == "tp" and e.nbytes > 64]
        found[name] = {
            op: (sum(e.nbytes for e in rows if e.op == op), sum(e.op == op for e in rows))
            for op in ("all_reduce", "all_gather", "reduce_scatter")
        }
    return found


def kept_inputs(rank: int, world: int) -> dict[bool, tuple[int, int]]:
    """By whether there are regions: bytes of inputs of checkpointed blocks between forward and backward, and after it."""
    import weakref

    found = {}
    for regions in (False, True):
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        engine = engine_of(model, world, hf_dist={"sequence_regions": regions})
        inputs: list[Any] = []
        for block in model.model.layers:
            block.register_forward_pre_hook(lambda _, args, into=inputs: into.append(weakref.ref(args[0])))

        def alive(seen: list[Any] = inputs) -> int:
            return sum(t.untyped_storage().nbytes() for ref in seen if (t := ref()) is not None)

        loss = engine(**batch()).loss
        between = alive()
        engine.backward(loss)
        found[regions] = between, alive()
    return found


def run_again(rank: int, world: int) -> dict[str, list[torch.Tensor]]:
    """By what comes before the backward that runs blocks again: gradients of the last block's norm with it, and without."""
    import hf_dist
    from tests.parallel.tensor import past_blocks

    def flagged() -> Any:
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def engine(model: Any) -> Any:
        return engine_of(model, world, hf_dist={"sequence_regions": True})

    def gradient(model: Any) -> torch.Tensor:
        return hf_dist.full_gradient(model.model.layers[-1].input_layernorm.weight).clone()

    parts = [batch(), {key: value[:, :7] for key, value in batch().items()}]
    found: dict[str, list[torch.Tensor]] = {}
    for name, make in (("lengths", flagged), ("lengths, own code", lambda: past_blocks.make(again=True))):
        together, apart = engine(make()), engine(make())
        together.backward(together(**parts[0]).loss + together(**parts[1]).loss)
        for part in parts:
            apart.backward(apart(**part).loss)
        found[name] = [gradient(together.model), gradient(apart.model)]
    found["no gradients"] = []
    for between in (True, False):
        own = engine(flagged())
        loss = own(**parts[0]).loss
        if between:
            with torch.no_grad():
                own(**parts[0])
        own.backward(loss)
        found["no gradients"].append(gradient(own.model))
    return found


def streamed(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Bytes that this rank reads of the file, and those of its slices."""
    from transformers import AutoModelForCausalLM

    import hf_dist
    from hf_dist.checkpoint import piece_source

    read = [0]
    kept = piece_source.PieceSource.read

    def counted(self: Any, start: int, stop: int, out: torch.Tensor) -> None:
        read[0] += (stop - start) * 4
        kept(self, start, stop, out)

    piece_source.PieceSource.read = counted  # type: ignore[method-assign]
    try:
        config = {"tensor_parallel": {"autotp_size": world}, "train_micro_batch_size_per_gpu": 2}
        model = hf_dist.from_pretrained(AutoModelForCausalLM, folder)
        engine = hf_dist.initialize(model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        piece_source.PieceSource.read = kept  # type: ignore[method-assign]
    own = sum(p.numel() * 4 for p in model.parameters())
    with hf_dist.gathered(model):
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"read": read[0], "own": own, "whole": whole, "loss": engine(**batch()).loss.item()}


def precise(rank: int, world: int, dtype: str) -> list[float]:
    """Losses of four steps in half precision."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    import hf_dist

    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": 3},
        "tensor_parallel": {"autotp_size": world},
        dtype: {"enabled": True},
    }
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer)
    return [float(engine.train_batch(iter([batch()]))) for _ in range(4)]


def user_code(rank: int, world: int, stage: int) -> dict[str, Any]:
    """Shapes, whole gradients (at stage 3 of parts of the sequence), a write by one rank, a forward by one rank alone."""
    import hf_dist

    model = llama(tie_word_embeddings=True)
    name = "model.layers.0.mlp.down_proj.weight"
    p = model.get_parameter(name)
    norm = model.model.layers[0].input_layernorm.weight
    regions = {"sequence_regions": world > 1 and stage == 3}
    engine = engine_of(model, world, zero_optimization={"stage": stage}, hf_dist=regions)
    found: dict[str, Any] = {"shape": tuple(p.shape), "full_shape": tuple(hf_dist.full_shape(p))}
    engine.backward(engine(**batch()).loss)
    found["gradient"], found["norm_gradient"] = hf_dist.full_gradient(p), hf_dist.full_gradient(norm)
    engine.step()
    with hf_dist.gathered(model):
        found["inside"] = tuple(p.shape)
        with torch.no_grad():
            found["alone"] = model(**batch()).loss.item() if rank == world - 1 else None
    with torch.no_grad():
        found["together"] = model(**batch()).loss.item()
    with hf_dist.gathered(model, modifier_rank=world - 1):
        if rank == world - 1:
            with torch.no_grad():
                p.fill_(0.5)
                norm.mul_(2.0)
    with hf_dist.gathered([p, norm]):
        found["written"] = (float(p.detach().min()), float(p.detach().max()), norm.detach().clone())
    found["after"] = tuple(p.shape)
    return found


def refusals(rank: int, world: int) -> dict[str, str]:
    """What cannot be, by name."""
    from peft import LoraConfig, get_peft_model

    import hf_dist

    def dora() -> Any:
        return get_peft_model(llama(), LoraConfig(r=2, use_dora=True, target_modules=["down_proj"]))

    def ia3() -> Any:
        from peft import IA3Config

        return get_peft_model(llama(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))

    def copied() -> Any:
        return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))

    def four_bits() -> Any:
        model = llama()
        row = model.model.layers[0].mlp.down_proj
        packed = type("Params4bit", (torch.nn.Parameter,), {})  # the name is what bitsandbytes' class is known by
        row.weight = packed(torch.zeros(row.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
        row.weight.quant_state = object()
        return model

    def stacked() -> Any:
        import transformers as tf

        small = dict(hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        sizes = dict(vocab_size=101, intermediate_size=56, moe_intermediate_size=32, num_experts=4)
        model = tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**small, **sizes, num_experts_per_tok=2, head_dim=8))
        named = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
        return get_peft_model(model, named)

    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "four_bits": (four_bits, {}),
        "stacked": (stacked, {}),
        "width": (lambda: llama(intermediate_size=55), {}),
        "heads": (lambda: llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=48, head_dim=16), {}),
        "dora": (dora, {}),
        "ia3": (ia3, {}),
        "copy": (copied, {}),
        "compile": (llama, {"compile": {"enabled": True}}),
        "custom": (lambda: torch.nn.Linear(4, 4), {}),
        "narrow": (mixture, {"bf16": {"enabled": True}}),
        "narrow, eager": (eager_mixture, {"bf16": {"enabled": True}}),
    }
    found = {}
    for name, (make, more) in cases.items():
        model = make()
        config = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": world}, **more}
        try:
            hf_dist.initialize(model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            found[name] = "was accepted"
        except hf_dist.errors.HfDistError as error:
            found[name] = str(error)
    return found
