"""Every trainer of the installed TRL, found by looking, and how a tiny training of each is written."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.ecosystem import trl_servers as servers
from tests.ecosystem.runs import arguments, over, weighted_tokens
from tests.ecosystem.tiny import CHAT, SPECIAL, completions, lora, preferences, prompts, tokenizer, words
from tests.hf.recipes import make_model
from tests.sharding.loop import difference

Trainer = type[Any]
COUNT = 24


@functools.cache
def trainers() -> dict[str, Trainer]:
    """Name -> class: `DPOTrainer` of `trl`, and `cpo.CPOTrainer` of its experimental packages. A new one is here by itself."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import trl.experimental
    import trl.trainer

    modules = {"": "trl.trainer"}
    for package in pkgutil.iter_modules(trl.experimental.__path__):
        modules[f"{package.name}."] = f"trl.experimental.{package.name}"
    found: dict[str, Trainer] = {}
    for prefix, path in modules.items():
        module = importlib.import_module(path)
        for name in getattr(module, "__all__", None) or dir(module):
            value = getattr(module, name) if name.endswith("Trainer") and not name.startswith("_") else None
            if inspect.isclass(value) and value not in found.values():
                found[prefix + name] = value
    return found


def config_of(name: str) -> Any:
    """The class of the arguments of a trainer."""
    import trl

    module = importlib.import_module(f"trl.experimental.{name.split('.')[0]}") if "." in name else trl
    config = name.rpartition(".")[2].removesuffix("Trainer") + "Config"
    return getattr(module, config, None) or getattr(trl, config)


# ---- datasets


def labelled(count: int) -> Any:
    """Prompts with completions that are wanted, or not."""
    rows = [{**row, "label": i % 3 > 0} for i, row in enumerate(completions(count))]
    return completions(0).from_list(rows)


def chats(count: int) -> Any:
    """Conversations of two turns."""
    rows = []
    for row in completions(count):
        turns = [("user", row["prompt"]), ("assistant", row["completion"])]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return completions(0).from_list(rows)


def triples(count: int) -> Any:
    """Preferences with a better answer than the chosen one."""
    g = torch.Generator().manual_seed(6)
    rows = [{**row, "reference": words(4 + i % 3, g)} for i, row in enumerate(preferences(count))]
    return completions(0).from_list(rows)


def hinted(count: int) -> Any:
    """Prompts with a hint that only the teacher sees."""
    g = torch.Generator().manual_seed(6)
    return completions(0).from_list([{**row, "privileged_context": words(3, g)} for row in prompts(count)])


def byte_tokenizer() -> Any:
    """One character is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = [*SPECIAL, *"\u0120w0123456789"]
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[], unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = tf.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", model_max_length=64)
    made.chat_template = CHAT
    return made


def half_right(completions: list[str], **_: Any) -> list[float]:
    """A reward of one or nothing, which depends on what was sampled."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


# ---- recipes


@dataclass(frozen=True)
class Recipe:
    """What a trainer is made with."""

    rows: Callable[[int], Any]
    options: dict[str, Any] = field(default_factory=dict)
    """Of its arguments."""
    given: Callable[[Path], dict[str, Any]] = lambda root: {}
    """To its constructor, besides model, arguments, rows, tokenizer and adapters."""
    model: str = "lm"
    takes_adapters: bool = True
    """Whether it has `peft_config`; else it gets a model with adapters."""
    task: str = "CAUSAL_LM"
    makes: Callable[[], Any] = tokenizer
    before: Callable[[], None] = lambda: None
    """Puts stand-ins in the place of servers."""


def _teacher(root: Path) -> dict[str, Any]:
    return {"teacher_model": str(root / "teacher")}


def _reward(root: Path) -> dict[str, Any]:
    return {"reward_funcs": weighted_tokens}


_GROUPS: dict[str, Any] = dict(num_generations=2, max_completion_length=8, beta=0.1)
_SAMPLED: dict[str, Any] = dict(max_length=24, max_completion_length=8)

RECIPES: dict[str, Recipe] = {
    "SFTTrainer": Recipe(completions, {"max_length": 16}),
    "DPOTrainer": Recipe(preferences, {"max_length": 16}),
    "KTOTrainer": Recipe(labelled, {"max_length": 16}),
    "RewardTrainer": Recipe(preferences, {"max_length": 16}, model="reward", task="SEQ_CLS"),
    "GRPOTrainer": Recipe(prompts, _GROUPS, _reward),
    "RLOOTrainer": Recipe(prompts, _GROUPS, _reward),
    "DistillationTrainer": Recipe(prompts, {"max_completion_length": 8}, _teacher),
    "a2po.A2POTrainer": Recipe(
        prompts,
        {"num_value_samples": 2, "max_completion_length": 8, "max_prompt_length": 16},
        lambda root: {"reward_funcs": half_right},
        takes_adapters=False,
    ),
    "async_distillation.AsyncDistillationTrainer": Recipe(
        prompts,
        {"token_budget": 0, "weight_sync_steps": 1, "model_init_kwargs": {"attn_implementation": "eager"}},
        lambda root: {"rollout_worker": servers.Worker("distillation"), "weight_transfer": servers.Transfer()},
        before=servers.without_a_gpu,
    ),
    "async_grpo.AsyncGRPOTrainer": Recipe(
        prompts,
        {"token_budget": 0, "weight_sync_steps": 1},
        lambda root: {"rollout_worker": servers.Worker("grpo"), "weight_transfer": servers.Transfer()},
        before=servers.without_a_gpu,
    ),
    "bema_for_ref_model.DPOTrainer": Recipe(preferences, {"max_length": 16}, lambda root: servers.bema()),
    "cpo.CPOTrainer": Recipe(preferences, {"max_length": 16}),
    "gkd.GKDTrainer": Recipe(chats, {"max_length": 24, "max_new_tokens": 8, "lmbda": 0.5}, _teacher),
    "gmpo.GMPOTrainer": Recipe(prompts, _GROUPS, _reward),
    "gold.GOLDTrainer": Recipe(
        chats,
        {"max_length": 48, "max_completion_length": 8, "lmbda": 0.5, "use_uld_loss": False},
        _teacher,
        makes=byte_tokenizer,
    ),
    "iw_opd.IWOPDTrainer": Recipe(chats, {**_SAMPLED, "lmbda": 1.0}, _teacher),
    "online_dpo.OnlineDPOTrainer": Recipe(prompts, {"max_length": 24, "max_new_tokens": 8}, _reward),
    "orpo.ORPOTrainer": Recipe(preferences, {"max_length": 16}),
    "sdft.SDFTTrainer": Recipe(hinted, {"max_completion_length": 8, "distillation_topk": 8}),
    "sdpo.SDPOTrainer": Recipe(
        prompts,
        # Every sample succeeds: TRL's ranks wait for each other where one has a success and another has none.
        {**_GROUPS, "distillation_weight": 0.5, "distillation_topk": 8, "success_reward_threshold": 0.0},
        lambda root: {"reward_funcs": half_right},
    ),
    "server_distillation.ServerDistillationTrainer": Recipe(
        prompts,
        {"max_completion_length": 8, "beta": 1.0, "teacher_model_server_url": "http://127.0.0.1:1"},
        before=servers.teacher_in_place,
    ),
    "tpo.TPOTrainer": Recipe(triples, {"max_length": 24}),
}

ALIASES = {"kto.KTOTrainer": "KTOTrainer", "distillation.DistillationTrainer": "DistillationTrainer"}
"""Names that TRL keeps for what has moved, and where to: the class below is the other one's."""


def save_teacher(root: Path) -> None:
    """`root/teacher`: as `root/lm`, with other weights and a head of its own."""
    config = make_model("llama").config
    config.tie_word_embeddings = False
    torch.manual_seed(8)
    tf.LlamaForCausalLM(config).save_pretrained(root / "teacher")
    tokenizer().save_pretrained(root / "teacher")


def build(folder: Path, name: str, stage: int | None, adapters: bool, root: str, **changes: Any) -> Any:
    """The trainer, with plain DDP where `stage` is None. `root`: the folder of `save_models` and `save_teacher`."""
    recipe, path = RECIPES[name], Path(root)
    recipe.before()
    tf.set_seed(3)  # some make adapters before they seed
    args = arguments(folder, stage, False, config_of(name), **{**recipe.options, **changes})
    given = {"processing_class": recipe.makes(), **recipe.given(path)}
    model: Any = str(path / recipe.model)
    if adapters and recipe.takes_adapters:
        given["peft_config"] = lora(recipe.task)
    elif adapters:
        model = make_model("lora")
    return over(stage, trainers()[name])(model, args=args, train_dataset=recipe.rows(COUNT), **given)


TIMES = ("perf/", "_per_second", "runtime", "step_time", "time_in_queue", "memory_", "rollout_queue_size", "_seconds")
"""In names of numbers that are no result; hf_dist's own columns are not compared."""


def run(folder: Path, name: str, stage: int | None, adapters: bool, root: str, **changes: Any) -> dict[str, Any]:
    """Losses, gradient norms, TRL's numbers of the log, every weight after three steps, and what a server was sent last."""
    trainer = build(folder, name, stage, adapters, root, **changes)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    numbers = {
        key: [float(entry[key]) for entry in logs]
        for key in logs[0]
        if not any(word in key for word in TIMES) and all(isinstance(entry.get(key), (int, float)) for entry in logs)
    }
    state = trainer.accelerator.get_state_dict(trainer.model)
    sent = getattr(getattr(trainer, "weight_transfer", None), "weights", {})
    weights = {**state, **{f"sent {key}": value for key, value in sent.items()}}
    weights = weights if trainer.accelerator.is_main_process else {}  # ours are collected there
    return {"log": numbers, "weights": {key: value.detach().float().clone() for key, value in weights.items()}}


def difference_of(outcome: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """The worst relative difference (of numbers below 0.1: to 0.1) and where it is. What `expected` lacks is not compared."""
    found = {name: 1.0 for name in expected["weights"].keys() ^ outcome["weights"].keys()}
    for name in expected["weights"].keys() - found.keys():
        found[name] = difference(outcome["weights"][name], expected["weights"][name])
    for key, numbers in expected["log"].items():
        values = outcome["log"].get(key, [])
        found[key] = max(
            (abs(a - b) / max(abs(b), 0.1) for a, b in zip(values, numbers, strict=True)), default=1.0
        ) if len(values) == len(numbers) else 1.0  # fmt: skip
    where = max(found, key=lambda name: found[name] if found[name] == found[name] else float("inf"))
    return found[where], where
