"""Classify a sentence with a model saved by finetune_text_classification.py: plain transformers, no hf_dist.

python examples/classify.py runs/text_classification "Parse an address from a header of a message."
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

DEFAULT_SENTENCE = "Run a coroutine in the event loop and return its result."


def read_sentence(given: str | None) -> str:
    """The argument, else the line that the user types or pipes in, else a default."""
    if given:
        return given
    if sys.stdin.isatty():
        print("Describe a function of the standard library: ", end="", flush=True)
    return sys.stdin.readline().strip() or DEFAULT_SENTENCE


def main() -> None:
    """Print the three most likely classes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="runs/text_classification", help="a saved folder")
    parser.add_argument("sentence", nargs="?", help="what to classify; asked for when missing")
    arguments = parser.parse_args()

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model).eval()
    sentence = read_sentence(arguments.sentence)
    with torch.inference_mode():
        logits = model(**tokenizer(sentence, truncation=True, return_tensors="pt")).logits[0]
    probabilities, classes = logits.float().softmax(dim=-1).topk(min(3, len(logits)))
    print(f'Which module is this docstring from? "{sentence}"')
    for probability, index in zip(probabilities.tolist(), classes.tolist(), strict=True):
        print(f"  {probability:6.1%}  {model.config.id2label[index]}")


if __name__ == "__main__":
    main()
