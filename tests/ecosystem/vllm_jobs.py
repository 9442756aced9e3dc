"""TRL's own `VLLMGeneration` with a stand-in for vLLM's server: what arrives there, and what a trainer makes of it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.ecosystem.tiny import lora
from tests.ecosystem.vllm_client import real_client
from tests.hf.recipes import make_model

Tensors = dict[str, torch.Tensor]


class Server:
    """In the place of TRL's client. Of a watched engine it keeps every tensor until the last has come, as vLLM's packing does.

    TRL itself takes the adapters out again when its iterator ends, before the last package is sent.
    """

    watched: Any = None
    """An engine, whose gathered elements are looked at whenever a tensor comes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.weights: Tensors = {}
        self.most_gathered = 0

    def init_communicator(self, device: Any) -> None:
        """Nothing to connect."""

    def weight_update(self) -> Any:
        """Several tensors, one after the other."""
        return nullcontext()

    def update_named_param(self, name: str, tensor: torch.Tensor) -> None:
        """One of them."""
        self.weights[name] = tensor.clone()

    def reset_prefix_cache(self) -> None:
        """No cache."""

    def update_named_params(self, metadata: list[Any], named: Any) -> None:
        """As announced, in that order."""
        arrived = []
        for name, tensor in named:
            arrived.append((name, tensor if self.watched is not None else tensor.clone()))
            groups = self.watched.sharded.groups if self.watched is not None else ()
            self.most_gathered = max(self.most_gathered, sum(g.layout.numel for g in groups if g.full.is_allocated))
        told = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in arrived]
        assert told == metadata
        self.weights = {name: tensor.clone() for name, tensor in arrived}


def adapted(kind: str) -> Any:
    """A Llama, whole or with adapters on every linear layer; `dora`: whose merge is no sum; `head`: and a head in a copy."""
    model = make_model("llama")
    if kind == "full":
        return model
    from peft import get_peft_model

    config = lora()
    config.use_dora = kind == "dora"
    if kind == "head":
        config.target_modules, config.modules_to_save = {"q_proj", "down_proj"}, ["lm_head"]
    torch.manual_seed(4)
    made = get_peft_model(model, config)
    with torch.no_grad():
        for name, param in made.named_parameters():
            if "magnitude" in name:  # until then the sum is that of LoRA
                param.mul_(1.5)
    return made


def generation(model: Any, accelerator: Any, mode: str = "server") -> Any:
    """TRL's, with the stand-in; in `colocate` mode its engine is one, too."""
    from trl.generation import vllm_generation as trl

    trl.is_vllm_available, trl.VLLMClient = lambda: True, Server
    if mode == "client":
        trl.VLLMClient = real_client()
    if mode in ("server", "client"):
        return trl.VLLMGeneration(model, accelerator, processing_class=None, mode="server")
    if mode == "online_dpo":
        return online_dpo(model, accelerator)
    made = object.__new__(trl.VLLMGeneration)
    weights: Tensors = {}
    runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda pairs: weights.update(pairs)))
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    made.llm = SimpleNamespace(
        llm_engine=SimpleNamespace(model_executor=executor), reset_prefix_cache=lambda: None, weights=weights
    )
    made.__dict__.update(model=model, accelerator=accelerator, mode=mode, enable_sleep_mode=False)
    made._dist = trl.DistributedBackend(accelerator)
    return made


def online_dpo(model: Any, accelerator: Any) -> Any:
    """What is left of the trainer that speaks with the server by itself."""
    from trl.experimental.online_dpo import OnlineDPOTrainer

    made = object.__new__(OnlineDPOTrainer)
    made.__dict__.update(model=model, accelerator=accelerator, vllm_mode="server", vllm_client=Server())
    made.__dict__["sync_weights"] = made._move_model_to_vllm
    return made


def adapter_for_server(folder: Path, stage: int) -> bool:
    """Whether the folder that asynchronous trainers publish has the adapter as it was, bit for bit; on the main rank."""
    from safetensors.torch import load_file
    from trl.experimental.async_grpo import async_grpo_trainer

    import hf_dist

    accelerator = hf_dist.DistAccelerator(dist_config={"zero_optimization": {"stage": stage}})
    model = adapted("lora")
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, _ = accelerator.prepare(model, optimizer)
    async_grpo_trainer.save_lora_adapter(model, accelerator, "default", str(folder / "policy"))
    accelerator.wait_for_everyone()
    found = load_file(folder / "policy" / "adapter_model.safetensors")
    expected = {name.replace(".default", ""): tensor for name, tensor in before.items()}
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def alone(kind: str) -> Tensors:
    """What TRL itself sends from one process."""
    from accelerate import Accelerator

    made = generation(adapted(kind), Accelerator(cpu=True))
    made.sync_weights()
    weights: Tensors = made.vllm_client.weights
    return weights


def synchronised(folder: Path, kind: str, stage: int, mode: str = "server") -> dict[str, Any]:
    """Two synchronisations of a prepared model; its own weights before and after; how much was whole at a time."""
    # Before the model is prepared, as scripts import their trainer.
    import trl.experimental.online_dpo.online_dpo_trainer
    import trl.generation.vllm_generation  # noqa: F401

    import hf_dist

    accelerator = hf_dist.DistAccelerator(dist_config={"zero_optimization": {"stage": stage}})
    model = adapted(kind)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, _ = accelerator.prepare(model, optimizer)
    before = accelerator.get_state_dict(model)
    made = generation(model, accelerator, mode)
    engine = Server.watched = accelerator.engine
    for _ in range(2):
        made.sync_weights()
    Server.watched = None
    after = accelerator.get_state_dict(model)
    sizes = [g.layout.numel for g in engine.sharded.groups]
    is_main = accelerator.is_main_process
    server = getattr(made, "vllm_client", None) if mode != "colocate" else made.llm
    return {
        "weights": server.weights if server is not None else {},
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "most": server.most_gathered / sum(sizes) if is_main and mode == "server" else 0.0,
        "at rest": [g.full.is_allocated for g in engine.sharded.groups],
        "merged": any(getattr(m, "merged", False) for m in model.modules()),
    }
