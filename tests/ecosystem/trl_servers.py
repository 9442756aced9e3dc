"""In the place of the servers that some of TRL's trainers ask: a teacher, a sampler, one that takes weights."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.hf.recipes import VOCAB


class Teacher:
    """In the place of TRL's client: log-probabilities of tokens that follow from the tokens alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def get_sequence_logprobs(
        self, sequences: list[list[int]], prompt_lengths: list[int], top_logprobs: int = 1, temperature: float = 1.0
    ) -> dict[str, list[Any]]:
        """As TRL's."""
        found: dict[str, list[Any]] = {"logprobs": [], "logprob_token_ids": [], "actual_logprobs": []}
        for tokens, start in zip(sequences, prompt_lengths, strict=True):
            scores = [torch.log_softmax(_scores(tokens[i - 1]), -1) for i in range(start, len(tokens))]
            best = [s.topk(top_logprobs) for s in scores]
            found["logprobs"].append([b.values.tolist() for b in best])
            found["logprob_token_ids"].append([b.indices.tolist() for b in best])
            found["actual_logprobs"].append([[float(s[t])] for s, t in zip(scores, tokens[start:], strict=True)])
        return found


def _scores(token: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(token))


def teacher_in_place() -> None:
    """`ServerDistillationTrainer` asks the stand-in."""
    from trl.generation import vllm_client

    vllm_client.VLLMClient = Teacher


class Worker:
    """In the place of a rollout worker: samples that were made before; `kind`: of which trainer."""

    def __init__(self, kind: str, count: int = 64) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        make = _sample_of_grpo if kind == "grpo" else _sample_of_distillation
        for i in range(count):
            self.rollout_buffer.put(make(i))

    def start(self) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def update_model_version(self, version: int) -> None:
        """The samples stay as they are."""

    def check_health(self, stale_after_s: float) -> None:
        """It is well."""


def _tokens(index: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(index)
    length = 8 + index % 5
    mask = np.zeros(length, dtype=np.int64)
    mask[3:] = 1
    return draw.integers(3, VOCAB, length), mask


def _sample_of_grpo(index: int) -> Any:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    ids, mask = _tokens(index)
    old = np.random.default_rng(index + 1000).normal(-4.0, 0.2, len(ids))
    return RolloutSample(
        prompt=[], completion=[], input_ids=ids, completion_mask=mask, old_log_probs=old,
        advantage=float(index % 3 - 1) or 0.5, model_version=100, group_id=index, metrics={},
    )  # fmt: skip


def _sample_of_distillation(index: int) -> Any:
    from trl.experimental.async_distillation.async_rollout_worker import RolloutSample

    ids, mask = _tokens(index)
    best = [torch.log_softmax(_scores(int(token)), -1).topk(4) for token in ids]
    return RolloutSample(
        prompt=[], completion=[], input_ids=ids, completion_mask=mask,
        teacher_topk_ids=np.array([b.indices.tolist() for b in best]),
        teacher_topk_logprobs=np.array([b.values.tolist() for b in best]),
        model_version=100, metrics={}, teacher_id="default", prompt_id=index,
    )  # fmt: skip


class Transfer:
    """In the place of the client that streams weights to vLLM: keeps the last ones."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def init_weight_transfer(self) -> None:
        """Nothing to connect."""

    def pause(self) -> None:
        """Nothing to pause."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Takes them all."""
        for name, tensor in iterator:
            self.weights[name] = tensor.clone()

    def resume(self) -> None:
        """Nothing to resume."""

    def destroy(self) -> None:
        """Nothing to release."""


def without_a_gpu() -> None:
    """TRL's asynchronous trainers ask the GPU for its name; the packed attention of one is a kernel: the same sum in torch."""
    from trl.experimental.async_distillation import async_distillation_trainer
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    for module in (async_distillation_trainer, async_grpo_trainer):
        module.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_segments)  # type: ignore[assignment]


def _segments(
    query: Any, key: Any, value: Any, starts: Any, ends: Any, most: Any, longest: Any, *, softmax_scale: Any, **_: Any
) -> torch.Tensor:
    """Each segment of `query` (tokens, heads, width) attends to its part of `key`, causally, aligned at the end."""
    found = []
    group = query.shape[1] // key.shape[1]
    for i in range(len(starts) - 1):
        own = slice(int(starts[i]), int(starts[i + 1]))
        path = slice(int(ends[i]), int(ends[i + 1]))
        q, k, v = (t.transpose(0, 1) for t in (query[own], key[path], value[path]))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        rows, columns = q.shape[1], k.shape[1]
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale)
        found.append(out.transpose(0, 1))
    return torch.cat(found)


def bema() -> dict[str, Any]:
    """The callback that moves the reference model of DPO."""
    from trl.experimental.bema_for_ref_model import BEMACallback

    every: dict[str, Any] = dict(update_freq=1, ref_model_update_freq=1, update_ref_model=True)
    return {"callbacks": [BEMACallback(**every)]}
