"""Tiny tokenizer, model folders and datasets for the libraries around the Trainer: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf
from datasets import Dataset

from tests.hf.recipes import SMALL, VOCAB, make_model

SPECIAL = ["<pad>", "<eos>", "<bos>"]
CHAT = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"


def tokenizer() -> Any:
    """One word is one token: `w3` to `w63`, after the special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCAB))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = tf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", model_max_length=64
    )
    made.chat_template = CHAT
    return made


def save_models(root: Path) -> None:
    """`root/lm` and `root/reward`, with the tokenizer beside them."""
    for name, model in (("lm", make_model("llama")), ("reward", reward_model())):
        model.save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)


def reward_model() -> Any:
    """A Llama that gives one number per sequence."""
    torch.manual_seed(3)
    config = tf.LlamaConfig(**SMALL, vocab_size=VOCAB, num_key_value_heads=2, pad_token_id=0, eos_token_id=1)
    config.num_labels = 1
    return tf.LlamaForSequenceClassification(config)


def lora(task: str = "CAUSAL_LM") -> Any:
    """Adapters on every linear layer; B is not zero, so that every gradient is something."""
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type=task)


def words(count: int, generator: torch.Generator) -> str:
    """That many random words."""
    return " ".join(f"w{int(i)}" for i in torch.randint(len(SPECIAL), VOCAB, (count,), generator=generator))


def prompts(count: int) -> Dataset:
    """Prompts of 3 to 8 words."""
    g = torch.Generator().manual_seed(1)
    return Dataset.from_list([{"prompt": words(3 + i % 6, g)} for i in range(count)])


def completions(count: int) -> Dataset:
    """Prompts with completions of ragged lengths."""
    g = torch.Generator().manual_seed(2)
    rows = [{"prompt": words(2 + i % 4, g) + " ", "completion": words(3 + i % 7, g)} for i in range(count)]
    return Dataset.from_list(rows)


def preferences(count: int) -> Dataset:
    """Prompts with a chosen and a rejected completion."""
    g = torch.Generator().manual_seed(3)
    return Dataset.from_list(
        [
            {
                "prompt": words(2 + i % 4, g) + " ",
                "chosen": words(3 + i % 5, g),
                "rejected": words(2 + i % 6, g),
            }
            for i in range(count)
        ]
    )


def stored_preferences(folder: Path, count: int) -> Dataset:
    """`preferences`, in files that all ranks share."""
    from accelerate import PartialState

    with PartialState().main_process_first():
        if not folder.exists():
            preferences(count).save_to_disk(folder)
    return Dataset.load_from_disk(str(folder))
