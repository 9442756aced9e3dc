"""One run of a Trainer, a TRL trainer or a raw loop on this rank: with plain DDP (`stage` None), or sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from hf_dist.hf.evaluation import each_batch_by_itself
from tests.ecosystem.loops import LOOPS, config_of
from tests.ecosystem.tiny import completions, lora, preferences, prompts, stored_preferences, tokenizer
from tests.hf.lifecycle import pairs
from tests.hf.recipes import make_model, pad, texts

Record = dict[str, Any]
STEPS = 3
METRICS = (
    *("rewards/margins", "reward", "completions/mean_length", "kl", "entropy", "mean_token_accuracy", "num_tokens"),
    *("accuracy", "margin", "min_reward", "mean_reward", "max_reward"),
)
"""That TRL's trainers make by themselves, of logits and of counts."""


def run(folder: Path, kind: str, stage: int | None, adapters: bool, checkpointing: bool, root: str) -> Record:
    """Losses, gradient norms and more of three steps of `kind`. `root`: the folder of `save_models`."""
    if kind in LOOPS:
        return LOOPS[kind](folder, stage, adapters, checkpointing)
    trainer = RUNS[kind](folder, stage, adapters, checkpointing, Path(root))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    extra = [k for k in METRICS if k in logs[0]]
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [float(entry["grad_norm"]) for entry in logs],
        **{key: [float(entry[key]) for entry in logs] for key in extra},
        **after_training(trainer, kind),
    }


def after_training(trainer: Any, kind: str) -> Record:
    """What else must be equal: evaluation, generation."""
    if trainer.eval_dataset is None:
        return {}
    with each_batch_by_itself(trainer.args):  # ours does so by itself, DDP divides by the tokens of all ranks
        found = trainer.evaluate()
    extra = [f"eval_{k}" for k in METRICS if f"eval_{k}" in found]
    return {"evaluated": found["eval_loss"], **{k: found[k] for k in extra}}


def arguments(folder: Path, stage: int | None, checkpointing: bool, base: Any, **changes: Any) -> Any:
    """Arguments of class `base`, ours over it when `stage` is given. Epsilon is large: rounding decides no sign."""
    given: dict[str, Any] = {
        **dict(output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", seed=5),
        **dict(logging_steps=1, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2),
        **dict(learning_rate=5e-3, adam_epsilon=1e-3, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=0),
        # TRL's default is bf16.
        **dict(per_device_eval_batch_size=2, ddp_timeout=300, gradient_checkpointing=checkpointing, bf16=False),
        **changes,
    }
    if stage is None:
        return base(**given)
    from hf_dist import DistArgsMixin

    ours: Any = dataclass(type("Dist" + base.__name__, (DistArgsMixin, base), {}))
    globals()[ours.__name__] = ours  # a Trainer that saves pickles its arguments
    return ours(**{"dist_config": config_of(stage), **given})


def over(stage: int | None, base: Any) -> Any:
    """The class as a user would write it."""
    from hf_dist import DistTrainerMixin

    return base if stage is None else type("Dist" + base.__name__, (DistTrainerMixin, base), {})


# ---- transformers


def plain(folder: Path, stage: int | None, adapters: bool, checkpointing: bool, root: Path) -> Any:
    """The Trainer on a causal language model."""
    args = arguments(folder, stage, checkpointing, tf.TrainingArguments)
    rows = texts(24)
    model = make_model("lora" if adapters else "llama")
    return over(stage, tf.Trainer)(model, args, train_dataset=rows, eval_dataset=rows[:8], data_collator=pad)


def seq2seq(folder: Path, stage: int | None, adapters: bool, checkpointing: bool, root: Path) -> Any:
    """The Seq2SeqTrainer on a T5, which returns a mean: HF multiplies it by ranks and microbatches, where there are more."""
    changes = dict(average_tokens_across_devices=False, gradient_accumulation_steps=1)
    args = arguments(folder, stage, checkpointing, tf.Seq2SeqTrainingArguments, **changes)
    model = make_model("t5")
    if adapters:
        from peft import get_peft_model

        torch.manual_seed(4)
        model = get_peft_model(model, lora("SEQ_2_SEQ_LM"))
    return over(stage, tf.Seq2SeqTrainer)(
        model, args, train_dataset=pairs(24), eval_dataset=pairs(8), data_collator=pad
    )


# ---- TRL


def sft(folder: Path, stage: int | None, adapters: bool, checkpointing: bool, root: Path, **changes: Any) -> Any:
    """Prompts and completions, loss on the completions only."""
    from trl import SFTConfig, SFTTrainer

    args = arguments(folder, stage, checkpointing, SFTConfig, max_length=16, **changes)
    return over(stage, SFTTrainer)(
        str(root / "lm"), args, train_dataset=completions(24), eval_dataset=completions(8),
        processing_class=tokenizer(), peft_config=lora() if adapters else None,
    )  # fmt: skip


def packed(folder: Path, stage: int | None, adapters: bool, checkpointing: bool, root: Path) -> Any:
    """SFT on packed rows without padding."""
    # The attention of these rows is not separated without flash attention: the same on both sides.
    return sft(folder, stage, adapters, checkpointing, root, packing=True, padding_free=True)


def dpo(
    folder: Path,
    stage: int | None,
    adapters: bool,
    checkpointing: bool,
    root: Path,
    rows: Any = None,
    evaluated: int = 4,
    **changes: Any,
) -> Any:
    """A reference model that TRL loads by itself; with adapters the reference is the base model."""
    from trl import DPOConfig, DPOTrainer

    args = arguments(folder, stage, checkpointing, DPOConfig, max_length=16, **changes)
    return over(stage, DPOTrainer)(
        str(root / "lm"), args=args, train_dataset=rows or preferences(24),
        eval_dataset=None if rows else preferences(evaluated),
        processing_class=tokenizer(), peft_config=lora() if adapters else None,
    )  # fmt: skip


def synced(folder: Path, stage: int | None, adapters: bool, checkpointing: bool, root: Path) -> Any:
    """DPO whose reference model follows the policy after every step."""
    changes = dict(sync_ref_model=True, ref_model_mixup_alpha=0.5, ref_model_sync_steps=1)
    return dpo(folder, stage, adapters, checkpointing, root, **changes)


def precomputed(folder: Path, stage: int | None, adapters: bool, checkpointing: bool, root: Path) -> Any:
    """DPO that computes the reference before training, with the policy itself."""
    # TRL keeps the values in a file beside the data, so these have to be on disk.
    rows = stored_preferences(root / str(folder.name), 24)
    return dpo(folder, stage, adapters, checkpointing, root, rows=rows, precompute_ref_log_probs=True)


def reward(
    folder: Path, stage: int | None, adapters: bool, checkpointing: bool, root: Path, evaluated: int = 4, **changes: Any
) -> Any:
    """A reward model on preferences; `evaluated` rows to evaluate with."""
    from trl import RewardConfig, RewardTrainer

    args = arguments(folder, stage, checkpointing, RewardConfig, max_length=16, **changes)
    return over(stage, RewardTrainer)(
        str(root / "reward"), args=args, train_dataset=preferences(24), eval_dataset=preferences(evaluated),
        processing_class=tokenizer(), peft_config=lora("SEQ_CLS") if adapters else None,
    )  # fmt: skip


def weighted_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that depends on every sampled token and its place.

    Two completions of one prompt must not get nearly the same: an advantage is their difference over its own deviation, so the
    last bit of the reward model's score would become the sixth digit of the advantage.
    """
    return [sum(i * place for place, i in enumerate(ids, 1)) / 256 for ids in completion_ids]


def grpo(folder: Path, stage: int | None, adapters: bool, checkpointing: bool, root: Path) -> Any:
    """Two generations per prompt, a reference model, a reward function and a reward model."""
    from trl import GRPOConfig, GRPOTrainer

    args = arguments(
        folder, stage, checkpointing, GRPOConfig, num_generations=2, max_completion_length=8, beta=0.1,
        log_completions=False,
    )  # fmt: skip
    return over(stage, GRPOTrainer)(
        str(root / "lm"), [weighted_tokens, str(root / "reward")], args, train_dataset=prompts(24),
        processing_class=tokenizer(), reward_processing_classes=[None, tokenizer()],
        peft_config=lora() if adapters else None,
    )  # fmt: skip


def uneven(folder: Path, kind: str, stage: int | None, root: str) -> dict[str, float]:
    """The metrics of seven preferences, three in a batch: the collator makes two rows of each."""
    build = {"reward": reward, "dpo": dpo}[kind]
    trainer = build(folder, stage, False, False, Path(root), per_device_eval_batch_size=3, evaluated=7)
    skipped = ("runtime", "per_second", "time")
    return {key: value for key, value in trainer.evaluate().items() if not any(word in key for word in skipped)}


def refused_over_stages(folder: Path, root: str) -> dict[str, str]:
    """The errors of trainers that generate or ask a reference model, over pipeline stages."""
    messages = {}
    for kind in ("dpo", "grpo"):
        try:
            RUNS[kind](folder, 4, False, False, Path(root))
        except Exception as error:
            messages[kind] = f"{type(error).__name__}: {error}"
    return messages


RUNS: dict[str, Callable[..., Any]] = {
    "trainer": plain,
    "seq2seq": seq2seq,
    "sft": sft,
    "packed": packed,
    "dpo": dpo,
    "synced": synced,
    "precomputed": precomputed,
    "reward": reward,
    "grpo": grpo,
}
