"""Train a small mixture of experts from scratch: experts are on different processes, and tokens are sent to them.

    torchrun --nproc_per_node 2 examples/mixture.py --dist_config configs/experts.json --use_cpu --max_steps 20

The same script trains with any other config of `configs/` (`zero3.json` all-gathers expert weights instead), and in
one process. The model's own auxiliary loss, computed over all processes, balances the routers.
"""

from __future__ import annotations

import math
from pathlib import Path

from train_clm import make_tokenizer, parse_arguments, prepare_data, read_texts
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    default_data_collator,
    set_seed,
)

from hf_dist import DistTrainer

SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 192,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
}


def small_mixture(tokenizer: PreTrainedTokenizerBase, block_size: int) -> Qwen3MoeForCausalLM:
    """16 experts, 2 of them per token; about 8M parameters, of which a token uses a sixth."""
    config = Qwen3MoeConfig(
        **SHAPE,
        vocab_size=len(tokenizer),
        max_position_embeddings=max(2048, block_size),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=False,
    )
    config.output_router_logits, config.router_aux_loss_coef = True, 0.01
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    """Train, print how evenly the experts were used, evaluate, save."""
    example, args = parse_arguments(output_dir="runs/mixture")
    set_seed(args.seed)
    texts = read_texts(example, args.seed)
    folder = Path(args.output_dir, "tokenizer")
    with args.main_process_first(desc="making the tokenizer"):
        if args.local_process_index == 0:
            make_tokenizer(texts, example.vocab_size, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    data = prepare_data(texts, tokenizer, example.block_size)
    trainer = DistTrainer(
        model=small_mixture(tokenizer, example.block_size),
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["eval"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        loads = [entry["expert_load"] for entry in trainer.state.log_history if "expert_load" in entry]
        if loads:
            print(f"rows of the busiest expert over the mean: {loads[0]:.2f} at first, {loads[-1]:.2f} at the end")
        print(f"perplexity before: {math.exp(before):.1f}  after: {math.exp(after):.1f}")
        print(f"saved to {args.output_dir}")


if __name__ == "__main__":
    main()
