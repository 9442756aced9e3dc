"""What ranks do with a model whose Trainer is gone, or that another Trainer takes over; one function a story."""

from __future__ import annotations

import copy
import functools
import gc
import io
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.utils.data import SequentialSampler

from tests.attempts import attempts
from tests.covering import FULL_GRID

STEPS, ROWS, WORDS = 2, 4, 64
MANY = 10 if FULL_GRID else 6
PROMPT = torch.tensor([[3, 4, 5, 6]])
Weights = dict[str, torch.Tensor]


def small_model(lora: bool = False) -> Any:
    """A Llama, alone or under adapters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=2, eos_token_id=2, **shape))
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def rows() -> list[dict[str, list[int]]]:
    """For a whole training; the ranks share each batch of them."""
    tokens = torch.randint(3, WORDS, (STEPS * ROWS, 8), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(model: Any, folder: str, stage: int | None, ranks: int = 1, config: Any = None, **more: Any) -> Any:
    """Ours at a stage, or the stock one."""
    from transformers import Trainer, TrainingArguments

    from hf_dist import DistTrainer, DistTrainingArguments

    base, kind, own = Trainer, TrainingArguments, {}
    if stage is not None:
        quiet = {"stall_report_seconds": 0, "check_load": False}
        base, kind = DistTrainer, DistTrainingArguments
        own = {"dist_config": {"zero_optimization": {"stage": stage}, "hf_dist": quiet, **(config or {})}}

    class InOrder(base):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    # Adam divides by gradients that are close to nothing; their last bits differ with the number of ranks.
    options = {
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_steps": STEPS,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
    }
    options |= {"disable_tqdm": True, "per_device_train_batch_size": ROWS // ranks, "logging_steps": 1}
    arguments = kind(folder, **(options | own | more))
    return InOrder(model, arguments, train_dataset=rows(), eval_dataset=rows())


def finetune(model: Any, *args: Any, **more: Any) -> Any:
    """As a function of a user's does: the Trainer ends with it."""
    trainer(model, *args, **more).train()
    return model


def _ours(stage: int | None, ranks: int, folder: str) -> Callable[..., Any]:
    def run(model: Any, other: int | None = None, **more: Any) -> Any:
        return finetune(model, folder, stage if other is None or stage is None else other, ranks, **more)

    return run


def weights_of(model: Any) -> Weights:
    """Whole weights. Collective."""
    import hf_dist
    from hf_dist.sharding.ownership import shards_of

    with nullcontext() if shards_of(model) is None else hf_dist.gathered(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def outlives(stage: int | None, ranks: int, folder: str, lora: bool) -> dict[str, Any]:
    """The model works, saves and trains again after its Trainer is gone."""
    run = _ours(stage, ranks, folder)
    model = run(small_model(lora))
    gc.collect()
    model.eval()
    found: dict[str, Any] = {"logits": model(input_ids=PROMPT).logits.detach()}
    found["tokens"] = model.generate(input_ids=PROMPT, max_new_tokens=5, do_sample=False).tolist()
    model.save_pretrained(folder + "/saved")
    found["saved"] = weights_of(model)
    run(model, 3 if stage in (0, 1) else 1)  # another stage
    found["second"] = weights_of(model)
    run(model)
    found["third"] = weights_of(model)
    return found


CUTS: dict[str, dict[str, Any]] = {
    "pp": {"pipeline": {"stages": 2}},
    "tp": {"tensor_parallel": {"autotp_size": 2}},
    "cp": {"sequence_parallel_size": 2},
    "ep": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
}


def mixture() -> Any:
    """A small Qwen3 with experts and tied tables."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=True)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=WORDS, num_hidden_layers=2, eos_token_id=2, **shape, **experts)
    )


MODELS: dict[str, Callable[[], Any]] = {"plain": small_model, "lora": lambda: small_model(True), "experts": mixture}


def layouts(stage: int | None, ranks: int, folder: str, kind: str, cuts: Sequence[str]) -> dict[str, Any]:
    """One model under one layout after the other."""
    model = MODELS[kind]()
    objects = dict(model.named_parameters())
    found: dict[str, Any] = {}
    for number, cut in enumerate(cuts):
        config = CUTS.get(cut, {})
        shares = 1 if cut in ("pp", "tp", "cp") else ranks
        finetune(model, folder, stage, shares, **({} if stage is None else {"config": config}))
        gc.collect()
        if stage is not None and number + 1 == len(cuts):
            import hf_dist

            found["tokens"] = model.generate(input_ids=PROMPT, max_new_tokens=5, do_sample=False).tolist()
            hf_dist.unprepare(model)
            assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in objects.items()}
            assert all(p is objects[n] for n, p in model.named_parameters()), "parameters keep their objects"
    model.eval()
    found["tokens after"] = model.generate(input_ids=PROMPT, max_new_tokens=5, do_sample=False).tolist()
    found["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


def changed(stage: int | None, ranks: int, folder: str, kind: str, cut: str) -> dict[str, Any]:
    """After training, casts and other sizes (other adapters, of a model under adapters), and the next training."""
    from peft import LoraConfig
    from transformers import TrainerCallback

    model = MODELS[kind]()
    shares = 1 if cut in ("pp", "tp", "cp") else ranks
    kept = trainer(model, folder, stage, shares, config=CUTS.get(cut))
    said: list[str] = []

    class Casting(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            for change in (model.double, lambda: model.resize_token_embeddings(WORDS + 8)):
                try:
                    change()
                except ValueError as error:
                    said.append(str(error))

    if stage is not None:
        kept.add_callback(Casting())
    kept.train()
    model.to(torch.device("cpu"))  # changes nothing, so the model stays as it is
    model.eval().double()
    found: dict[str, Any] = {"logits": model(input_ids=PROMPT).logits.detach(), "said": said}
    found["loss"] = kept.evaluate()["eval_loss"]
    del kept
    finetune(model.float(), folder, stage, shares, config=CUTS.get(cut))
    torch.manual_seed(7)
    if kind == "lora":
        model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        model.delete_adapter("default")
        model.set_adapter("other")
    else:
        model.resize_token_embeddings(WORDS + 8, mean_resizing=False)
    finetune(model, folder, stage, shares, config=CUTS.get(cut))
    model.double().float()  # whole again, in pipelines too
    return {**found, "weights": weights_of(model)}


def loaded(stage: int | None, ranks: int, folder: str, kind: str, cut: str) -> dict[str, Any]:
    """A whole state is loaded between two trainings, then one entry of it; what is said of states that do not fit."""
    model = MODELS[kind]()
    state = {
        name: value + torch.linspace(0, 0.1, value.numel()).view_as(value) for name, value in model.state_dict().items()
    }
    kept = trainer(model, folder, stage, 1 if cut in ("pp", "tp", "cp") else ranks, config=CUTS.get(cut))
    kept.train()
    said: list[Any] = []
    names = [name for name in state if "norm" in name]
    for name in (names[0], names[-1]):  # of the first stage and of the last
        for wrong in ({k: v for k, v in state.items() if k != name}, {**state, "not." + name: state[name]}):
            try:
                model.load_state_dict(wrong)
            except RuntimeError as error:
                said.append(str(error))
    said.append(sorted(map(str, model.load_state_dict(state))))
    said.append([sorted(keys) for keys in model.load_state_dict({names[0]: state[names[0]] * 2}, strict=False)])
    kept.train()
    return {"weights": weights_of(model) | kept.accelerator.get_state_dict(model), "said": said}


def pickled(stage: int | None, ranks: int, folder: str, cut: str, lora: bool) -> dict[str, Any]:
    """`torch.save(model)` and `deepcopy` while its Trainer is there and after; then both train on, model and copy."""
    import hf_dist

    model = small_model(lora)
    alive = trainer(model, folder, stage, ranks, config=CUTS.get(cut))
    alive.train()
    found: dict[str, Any] = {"errors": []}
    for write in (copies, copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
        try:
            write(model)
        except Exception as error:
            found["errors"].append(f"{type(error).__name__}: {error}")
    if cut:
        return found
    with nullcontext() if stage is None else hf_dist.gathered(model):
        first = copies(model)
    del alive
    gc.collect()
    with nullcontext() if stage is None else hf_dist.gathered(model):
        second = copies(model)
    found["start"] = weights_of(model)
    found["ordinary"] = [ordinary_in(made) for made in (*first, *second)]
    found["copies"] = [
        {name: (p.requires_grad, p.detach().clone()) for name, p in made.named_parameters()}
        for made in (*first, *second)
    ]
    finetune(model, folder, stage, ranks)
    finetune(second[0], folder, stage, ranks)
    found["trained"] = [weights_of(model), weights_of(second[0])]
    return found


def copies(model: Any) -> tuple[Any, Any]:
    """Through a file, and in memory."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False), copy.deepcopy(model)


def ordinary_in(model: Any) -> list[Any]:
    """What of us is left in a copy, its parameters that share memory with others, and how its own forward fails."""
    left: list[Any] = [k for m in model.modules() for k, v in m.__dict__.items() if "hf_dist" in str(type(v))]
    left += [m for m in model.modules() if any("_hooks" in k and v for k, v in m.__dict__.items())]
    left += [k for p in model.parameters() for k in p.__dict__]
    left += [n for n, p in model.named_parameters() if p.untyped_storage().nbytes() != p.nbytes]
    left += [n for n, p in model.named_parameters() if type(p) is not torch.nn.Parameter]
    model(input_ids=PROMPT).logits.sum().backward()
    return left + [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]


def half_an_optimizer(stage: int, ranks: int, folder: str) -> str:
    """An optimizer over what a rank has of a model that is cut; the next layout is not."""
    import hf_dist
    from hf_dist.errors import ModelError

    model = finetune(small_model(), folder, stage, config=CUTS["pp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        hf_dist.initialize(model=model, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": 1})
    except ModelError as error:
        return f"refused: {error}".replace("\n", " ")
    return "accepted"


def alive(stage: int | None, ranks: int, folder: str) -> dict[str, Any]:
    """A second Trainer takes the model over while the first one is there."""
    model = small_model()
    first = trainer(model, folder, stage, ranks)
    first.train()
    second = trainer(model, folder, stage, ranks, weight_decay=0.5)
    second.train()
    first.save_model(folder + "/by_the_first")
    found: dict[str, Any] = {"weights": weights_of(model), "loss": first.evaluate()["eval_loss"]}
    if stage is not None:
        try:
            first.train()
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
    return found


def evaluated_first(stage: int | None, ranks: int, folder: str) -> dict[str, Any]:
    """Evaluation alone, then training by another Trainer, then an ordinary model."""
    import hf_dist

    model = small_model()
    loss = trainer(model, folder, stage, ranks).evaluate()["eval_loss"]
    finetune(model, folder, stage, ranks)
    if stage is not None:
        hf_dist.unprepare(model)
        left = [key for m in model.modules() for key, value in m.__dict__.items() if "hf_dist" in str(type(value))]
        assert not left, left
        assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return {"loss": loss, "weights": {name: p.detach().clone() for name, p in model.named_parameters()}}


def many(stage: int, ranks: int, folder: str) -> list[tuple[int, ...]]:
    """What is left after each of `MANY` Trainers in a row, half of them on one model.

    Sharded models, their groups of weights, bytes of tensors, process groups, threads, open files.
    """
    from hf_dist.sharding.group import FlatGroup
    from hf_dist.sharding.runtime import ShardedModel

    left, model = [], small_model()
    for number in range(MANY):
        finetune(model if number < MANY // 2 else small_model(), folder, stage, ranks)
        gc.collect()
        things = gc.get_objects()
        kinds = [type(thing) for thing in things]
        with torch._C.DisableTorchFunctionSubclass():  # freed parameters are asked, too
            storages = [t.untyped_storage() for t in things if issubclass(type(t), torch.Tensor) and not t.is_meta]
            nbytes = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        del things, storages
        counts = kinds.count(ShardedModel), kinds.count(FlatGroup), nbytes, len(distributed_c10d._world.pg_map)
        left.append((*counts, threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))))
    return left


def dropped(stage: int | None, ranks: int, folder: str, cut: str, lora: bool) -> list[str]:
    """What of a Trainer is there after it was dropped, without the cyclic collector: optimizer states would wait with it."""
    gc.collect()
    gc.disable()
    try:
        kept = trainer(
            small_model(lora), folder, stage, ranks, config=CUTS.get(cut), save_strategy="steps", save_steps=1
        )
        kept.train()
        kept.evaluate()
        parts = {
            "trainer": kept,
            "accelerator": kept.accelerator,
            "optimizer": kept.optimizer,
            "engine": kept.dist_engine,
        }
        found = {name: weakref.ref(part) for name, part in parts.items()}
        del kept, parts
        return [name for name, reference in found.items() if reference() is not None]
    finally:
        gc.enable()


def stories(rank: int, world: int, told: list[tuple[str, tuple[Any, ...]]], folder: str) -> list[Any]:
    """Every story in its own folder, which is the same on all ranks: what it returned, or the error."""

    def tell(number: int, name: str, arguments: tuple[Any, ...]) -> Any:
        outcome = globals()[name](arguments[0], world, f"{folder}/{number}", *arguments[1:])
        return outcome if rank == 0 or name in ("many", "half_an_optimizer", "dropped") else None

    return attempts(rank, world, (functools.partial(tell, number, *story) for number, story in enumerate(told)))
