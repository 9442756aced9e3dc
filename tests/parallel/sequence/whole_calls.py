"""What a split model returns beside logits and loss, and is given beside ids: that of the model, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch.nn import functional

import hf_dist
from tests.attempts import attempts_by_name

VOCAB, WIDTH, ROWS, LENGTH = 64, 32, 2, 11
Loss = Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]


def ids() -> torch.Tensor:
    return torch.randint(4, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def bert(cls: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    sizes = dict(hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCAB)
    return cls(cls.config_class(**sizes, **off, max_position_embeddings=40, **more))


def decoder(cls: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return cls(
        cls.config_class(**sizes, vocab_size=VOCAB, head_dim=8, pad_token_id=0, max_position_embeddings=64, **more)
    )


def opt() -> Any:
    torch.manual_seed(0)
    sizes = dict(hidden_size=WIDTH, word_embed_proj_dim=WIDTH, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4)
    return tf.OPTForCausalLM(tf.OPTConfig(**sizes, vocab_size=VOCAB, max_position_embeddings=40, dropout=0.0))


def t5() -> Any:
    torch.manual_seed(0)
    sizes = dict(d_model=WIDTH, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0)
    return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, decoder_start_token_id=0))


def own_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def of_pooled(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**batch)
    rows = torch.arange(len(output.pooler_output))
    return functional.cross_entropy(3 * output.pooler_output[:, :5], rows) + output.last_hidden_state.square().mean()


def of_hidden(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    states = model(**batch, output_hidden_states=True).hidden_states
    return torch.stack([(k + 1) * h.tanh().mean() for k, h in enumerate(states)]).sum() * 10


def of_router(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**batch, output_router_logits=True)
    return output.loss + torch.stack([x.logsumexp(-1).square().mean() for x in output.router_logits]).mean()


def of_continued(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The last tokens after the first ones, whose keys and values the model was asked for."""
    *beside, name = batch
    first, last = batch[name][:, :4], batch[name][:, 4:]
    given = {key: batch[key] for key in beside}
    with torch.no_grad():
        cache = model(**given, **{name: first}, use_cache=True).past_key_values
    return functional.cross_entropy(
        model(**given, **{name: last}, past_key_values=cache).logits.flatten(0, 1), ids()[:, 4:].flatten()
    )


def of_all_logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Those of padding, too, whose positions OPT counts from the mask."""
    output = model(**batch)
    return output.loss + output.logits.square().mean()


def labelled(**more: Any) -> dict[str, torch.Tensor]:
    labels = ids().masked_fill(torch.arange(LENGTH) % 3 == 0, -100)
    return {"input_ids": ids(), "labels": labels, **more}


def padded(side: str) -> dict[str, torch.Tensor]:
    """The second row is shorter; its first token is predicted by the last padding before it."""
    seen = torch.ones(ROWS, LENGTH, dtype=torch.long)
    seen[1, : LENGTH // 2 if side == "left" else 0] = 0
    seen[1, LENGTH // 2 if side == "right" else LENGTH :] = 0
    return {"input_ids": ids() * seen, "labels": ids().masked_fill(seen == 0, -100), "attention_mask": seen}


def embedded() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    return {"inputs_embeds": torch.randn(ROWS, LENGTH, WIDTH, generator=draw), "labels": ids()}


CASES: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, torch.Tensor]], Loss]] = {
    "pooled": (lambda: bert(tf.BertModel), lambda: {"input_ids": ids()}, of_pooled),
    "pretraining": (
        lambda: bert(tf.BertForPreTraining),
        lambda: labelled(next_sentence_label=torch.tensor([0, 1])),
        own_loss,
    ),
    "types": (
        lambda: bert(tf.BertForMaskedLM),
        lambda: labelled(token_type_ids=(torch.arange(LENGTH) > 4).long().expand(ROWS, -1)),
        own_loss,
    ),
    "embeds": (lambda: bert(tf.RobertaForMaskedLM, pad_token_id=1), embedded, own_loss),
    "continued": (lambda: decoder(tf.LlamaForCausalLM), lambda: {"input_ids": ids()}, of_continued),
    "continued pair": (t5, lambda: {"input_ids": ids(), "decoder_input_ids": ids().flip(1)}, of_continued),
    "padding": (opt, lambda: padded("right"), of_all_logits),
    "padding that is not counted": (
        lambda: bert(tf.BioGptForCausalLM, activation_dropout=0.0, layerdrop=0.0),
        lambda: padded("right"),
        of_all_logits,
    ),
    "hidden": (lambda: decoder(tf.LlamaForCausalLM), labelled, of_hidden),
    "router": (
        lambda: decoder(tf.MixtralForCausalLM, num_local_experts=4, router_aux_loss_coef=0.0),
        labelled,
        of_router,
    ),
    **{
        f"{name}-{side}": (
            lambda cls=cls, more=more: decoder(cls, sliding_window=4, **more),
            lambda side=side: padded(side),
            own_loss,
        )
        for name, cls, more in (
            ("gemma2", tf.Gemma2ForCausalLM, {}),
            ("gemma2 eager", tf.Gemma2ForCausalLM, {"attn_implementation": "eager"}),
            ("gemma3", tf.Gemma3ForCausalLM, {}),
            ("mistral eager", tf.MistralForCausalLM, {"attn_implementation": "eager"}),
        )
        for side in ("left", "right")
    },
}
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, torch.Tensor]], str]] = {
    "encoder states": (
        lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_layer=1, n_head=4, n_positions=40, add_cross_attention=True)
        ),
        lambda: labelled(encoder_hidden_states=torch.randn(ROWS, LENGTH, WIDTH)),
        "was called with encoder_hidden_states",
    ),
    "states of a head that pools": (
        lambda: bert(tf.BertForPreTraining),
        lambda: labelled(next_sentence_label=torch.tensor([0, 1]), output_hidden_states=True),
        "when it is called with output_hidden_states",
    ),
    "choices": (
        lambda: bert(tf.BertForMultipleChoice),
        lambda: {"input_ids": ids()[:, None].expand(-1, 2, -1), "labels": torch.tensor([0, 1])},
        "BertForMultipleChoice is another model on parts of a sequence",
    ),
    "end of text": (
        lambda: tf.CLIPTextModel(
            tf.CLIPTextConfig(
                vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                max_position_embeddings=40, eos_token_id=2,
            )
        ),
        lambda: {"input_ids": ids()},
        "pooler_output of a split model is not that of the model",
    ),
}  # fmt: skip


def split_of(model: Any) -> Any:
    config = {"train_micro_batch_size_per_gpu": ROWS, "sequence_parallel_size": 2, "zero_optimization": {"stage": 1}}
    return hf_dist.initialize(model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def compared(name: str) -> dict[str, tuple[Any, Any]]:
    """(of the split model, of the model): the loss and every gradient."""
    make, batch, loss = CASES[name]
    model = make()
    plain = copy.deepcopy(model)
    wanted = loss(plain, batch())
    wanted.backward()
    engine = split_of(model)
    found = loss(engine.model, batch())
    engine.backward(found)
    pairs: dict[str, tuple[Any, Any]] = {"loss": (found.detach(), wanted.detach())}
    for (key, p), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = hf_dist.full_gradient(p)
        pairs[key] = grad, torch.zeros_like(p) if other.grad is None else other.grad
    return {key: (torch.zeros_like(b) if a is None else a, b) for key, (a, b) in pairs.items()}


def said(name: str) -> list[str]:
    """The error of a call."""
    make, batch, _ = REFUSED[name]
    try:
        engine = split_of(make())
        output = engine.model(**batch())
        (output.loss if "loss" in output else output.pooler_output.sum()).backward()
    except Exception as error:
        return [str(error)]
    return []


def on_ranks(rank: int, world: int) -> dict[str, Any]:
    """Every case."""
    jobs = {name: (lambda name=name: compared(name)) for name in CASES}
    return attempts_by_name(rank, world, {**jobs, **{name: (lambda name=name: said(name)) for name in REFUSED}})
