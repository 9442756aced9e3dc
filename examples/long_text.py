"""Train a causal language model on long rows: packed source files, each of which attends only to itself.

    torchrun --nproc_per_node 2 examples/long_text.py --dist_config configs/long_context.json --use_cpu --max_steps 3

`sequence_parallel_size` in the JSON is the number of processes that share each row. Positions restart at every file: this
is how Hugging Face models tell packed documents apart. Model, tokenizer and text are those of `train_clm.py`.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from datasets import Dataset
from train_clm import make_tokenizer, parse_arguments, read_texts, small_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, default_data_collator, set_seed

from hf_dist import DistTrainer

NOT_LEARNED = -100


def packed_rows(texts: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
    """Rows of exactly `length` tokens: the files one after the other, with positions that restart at each file."""
    files = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts, verbose=False)["input_ids"]]
    tokens = list(chain.from_iterable(files))
    positions = list(chain.from_iterable(range(len(file)) for file in files))
    rows = []
    for start in range(0, len(tokens) - length + 1, length):
        ids, own = tokens[start : start + length], positions[start : start + length]
        cut = next((i for i, position in enumerate(own) if i and position == 0), length)  # the row begins inside a file
        own = [*range(cut), *own[cut:]]
        # The first token of a file has nothing to be predicted from.
        labels = [NOT_LEARNED if position == 0 else token for token, position in zip(ids, own, strict=True)]
        rows.append({"input_ids": ids, "labels": labels, "position_ids": own})
    return Dataset.from_list(rows)


def main() -> None:
    """Evaluate, train, evaluate again, save."""
    example, args = parse_arguments(output_dir="runs/long_text")
    set_seed(args.seed)
    texts = read_texts(example, args.seed)
    folder = example.model_name_or_path or Path(args.output_dir, "tokenizer")
    with args.main_process_first(desc="making the tokenizer"):
        if example.model_name_or_path is None and args.local_process_index == 0:
            make_tokenizer(texts, example.vocab_size, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if example.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(example.model_name_or_path)
    else:
        model = small_llama(tokenizer, example.block_size)
    rows = packed_rows(texts, tokenizer, example.block_size).train_test_split(test_size=2, seed=args.seed)
    trainer = DistTrainer(
        model=model,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(
            f"{len(rows['train'])} rows of {example.block_size} tokens; loss before: {before:.2f}  after: {after:.2f}"
        )
        print(f"saved to {args.output_dir}")


if __name__ == "__main__":
    main()
