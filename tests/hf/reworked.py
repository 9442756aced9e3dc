"""What scripts do with a trained model before the next training; one function a change."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from tests.ecosystem.loops import accelerator_of
from tests.hf.lifetimes import PROMPT, WORDS, Weights, finetune, rows, small_model, trainer, weights_of

Change = Callable[[Any], Any]


class Classifier(nn.Module):
    """The backbone of a language model under a head of one's own."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.backbone, self.score = backbone, nn.Linear(backbone.config.hidden_size, 3)

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        scores = self.score(self.backbone(input_ids=input_ids).last_hidden_state[:, -1])
        return {"loss": nn.functional.cross_entropy(scores, input_ids[:, 0] % 3), "logits": scores}


def resized(model: Any) -> Any:
    torch.manual_seed(5)
    model.resize_token_embeddings(WORDS + 8, mean_resizing=False)
    return model


def half_frozen(model: Any) -> Any:
    for name, param in model.named_parameters():
        param.requires_grad_("layers.0" not in name)
    return model


def other_head(model: Any) -> Any:
    torch.manual_seed(6)
    model.lm_head = nn.Linear(32, WORDS, bias=False)
    return model


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def merged(model: Any) -> Any:
    model = model.merge_and_unload()
    for param in model.parameters():
        param.requires_grad_(True)
    return model


def below_a_head(model: Any) -> Any:
    return Classifier(model.model)


def copied(model: Any) -> Any:
    return copy.deepcopy(model)


def loaded(model: Any) -> Any:
    model.load_state_dict(small_model().state_dict())
    return model


def fewer_layers(model: Any) -> Any:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    return model


CHANGES: dict[str, tuple[bool, Change]] = {
    "resized": (False, resized),
    "half_frozen": (False, half_frozen),
    "other_head": (False, other_head),
    "adapted": (False, adapted),
    "merged": (True, merged),
    "below_a_head": (False, below_a_head),
    "copied": (False, copied),
    "loaded": (False, loaded),
    "fewer_layers": (False, fewer_layers),
}
"""Whether the first training is of adapters, and what is done with the model after it."""


def reworked(folder: Path, stage: int | None, ranks: int, change: str, unprepares: bool = False) -> dict[str, Any]:
    """Train, change the model, train: the last weights. `unprepares`: as errors say, for what needs whole weights."""
    lora, act = CHANGES[change]
    model = finetune(small_model(lora), str(folder), stage, ranks)
    if unprepares and stage is not None:
        import hf_dist

        hf_dist.unprepare(model)
    model = act(model)
    gc.collect()
    if isinstance(model, Classifier):
        logits = model(PROMPT)["logits"].detach()  # what is left of the model still works
    else:
        logits = model(input_ids=PROMPT).logits.detach()
    finetune(model, str(folder), stage, ranks)
    return {"weights": weights_of(model), "logits": logits}


def among_stock_ones(folder: Path, stage: int | None, ranks: int, fresh: bool) -> dict[str, Any]:
    """Our Trainer, a stock one on the same ranks, ours again. `fresh`: of a model that is read from files before the second."""
    from transformers import AutoModelForCausalLM

    model = small_model()
    first = trainer(model, str(folder), stage, ranks)
    first.train()
    if fresh:
        first.save_model(str(folder / "start"))
        first.accelerator.wait_for_everyone()
        model = AutoModelForCausalLM.from_pretrained(folder / "start")
    finetune(model, str(folder), None, ranks)
    logits = model(input_ids=PROMPT).logits.detach()
    finetune(model, str(folder), stage, ranks)
    return {"weights": weights_of(model), "logits": logits}


def interrupted(folder: Path, stage: int | None, ranks: int) -> dict[str, Any]:
    """A training that ends after its first step with an exception, and another one of the same model."""
    from transformers import TrainerCallback

    class Stops(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    model = small_model()
    first = trainer(model, str(folder), stage, ranks)
    first.add_callback(Stops())
    with suppress(KeyboardInterrupt):
        first.train()
    del first
    finetune(model, str(folder), stage, ranks)
    return {"weights": weights_of(model), "logits": torch.zeros(1)}


def precisions(folder: Path, stage: int | None, ranks: int, config: dict[str, Any], start: Weights | None) -> list[Any]:
    """Saved weights after a training in half precision, which has left masters in fp32, and weights after one in fp32.

    The stock Trainer begins with `start`, as autocast is something else.
    """
    model = small_model()
    if start is None:
        first = trainer(model, str(folder), stage, ranks, config=config)
        first.train()
        first.save_model(str(folder / "masters"))
        model.save_pretrained(folder / "rounded")
        first.accelerator.wait_for_everyone()
        found = [load_file(folder / name / "model.safetensors") for name in ("masters", "rounded")]
    else:
        model.load_state_dict(start)
        found = [start]
    finetune(model, str(folder), stage, ranks)
    return [*found, weights_of(model)]


def raw_loops(folder: Path, stages: list[int | None], ranks: int, keeps: bool) -> dict[str, Any]:
    """One loop of accelerate after the other over one model, then a Trainer. `keeps`: the accelerators stay alive."""
    model, kept = small_model(), []
    for stage in stages:
        accelerator = accelerator_of(stage, gradient_accumulation_steps=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(4):
            batch = rows()[step * 2 : step * 2 + 2][accelerator.process_index :: ranks]
            tokens = torch.tensor([row["input_ids"] for row in batch])
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        kept += [accelerator] if keeps else []
        del accelerator, optimizer
    finetune(model, str(folder), stages[0], ranks)
    return {"weights": weights_of(model), "logits": torch.zeros(1)}
