"""What DistTrainer adds to the training log. Run as a script under torchrun it is the training of one rank."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback

from hf_dist import DistTrainer, DistTrainingArguments, log
from hf_dist.config import DistConfig
from hf_dist.dist import collectives
from hf_dist.hf.callbacks import LogCallback, MemoryCallback, ThroughputCallback, default_callbacks
from hf_dist.hf.callbacks.flops import TrainingFlops
from hf_dist.hf.callbacks.memory import peak_nbytes, reset_peak
from hf_dist.hf.callbacks.phases import PAUSE, WAIT, GpuClock, HostClock
from hf_dist.hf.callbacks.tokens import TokenCounter
from tests import forked

REPO = Path(__file__).resolve().parents[2]
SPLIT = {
    "time_data_percent",
    "time_forward_backward_percent",
    "time_optimizer_percent",
    "time_communication_wait_percent",
    "time_other_percent",
}
SPEED = {"tokens_per_second_per_rank", "samples_per_second", "model_tflops_per_rank"}
MEMORY = {"memory_peak_gb", "memory_peak_rank"}
LENGTHS = (16, 10, 7, 3)
CPU = torch.device("cpu")


class Reporter(TrainerCallback):
    """Keeps a copy of what TensorBoard would get; fails in step `fails_at`."""

    def __init__(self, fails_at: int = -1) -> None:
        self.seen: list[dict[str, Any]] = []
        self.fails_at = fails_at

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after our callbacks if the order is right."""
        self.seen.append(dict(kwargs["logs"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stand in for an error in the program."""
        if state.global_step == self.fails_at:
            raise RuntimeError("stopped by the test")


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A random model of two layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, **changes}))


def rows(count: int = 16) -> list[dict[str, torch.Tensor]]:
    """Texts of the four LENGTHS in turn, padded to 16."""
    found = []
    for i in range(count):
        mask = (torch.arange(16) < LENGTHS[i % len(LENGTHS)]).long()
        ids = torch.randint(2, 64, (16,)) * mask
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def trainer_in(folder: Path, reporter: TrainerCallback | None = None, **changes: Any) -> DistTrainer:
    """A DistTrainer that logs the second of two steps, each of two microbatches of two rows."""
    settings: dict[str, Any] = {
        "dist_config": {"zero_optimization": {"stage": 3}},
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_steps": 2,
        "logging_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        **changes,
    }
    args = DistTrainingArguments(str(folder), **settings)
    callbacks = [reporter] if reporter else []
    return DistTrainer(tiny_llama(), args, train_dataset=rows(), eval_dataset=rows(4), callbacks=callbacks)


def training_logs(trainer: DistTrainer) -> list[dict[str, Any]]:
    """The records of the training log."""
    return [record for record in trainer.state.log_history if "loss" in record]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[DistTrainer, list[dict[str, Any]]]:
    """A trainer after its training on rows in their order, and its training log."""
    trainer = trainer_in(tmp_path_factory.mktemp("trained"), train_sampling_strategy="sequential")
    trainer.train()
    return trainer, training_logs(trainer)


# ---- the log of a Trainer


def test_history_and_reporters_get_the_same_values_in_training_logs_only(tmp_path: Path) -> None:
    reporter = Reporter()
    every_second = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    trainer = trainer_in(tmp_path, reporter, max_steps=4, **every_second)
    trainer.train()
    records = training_logs(trainer)
    assert len(records) == 2
    for record in records:
        assert record.keys() >= SPLIT | SPEED | MEMORY
        assert all(
            record[key] > 0
            for key in SPEED | {"memory_peak_gb", "time_forward_backward_percent", "time_optimizer_percent"}
        )
        assert sum(record[key] for key in SPLIT) == pytest.approx(100)
        assert all(record[key] >= 0 for key in SPLIT)
    seen = [logs for logs in reporter.seen if "loss" in logs]
    assert [{**logs, "step": 2 * i + 2} for i, logs in enumerate(seen)] == records
    others = [record for record in trainer.state.log_history if "loss" not in record]
    assert others and not any(record.keys() & (SPLIT | SPEED | MEMORY) for record in others)
    json.dumps(trainer.state.log_history)


def test_padding_is_not_counted(trained: tuple[DistTrainer, list[dict[str, Any]]]) -> None:
    trainer, records = trained
    flops = TrainingFlops.of(trainer.model)
    assert flops is not None and records
    for record in records:
        tokens, pairs = sum(LENGTHS) / len(LENGTHS), sum(n * n for n in LENGTHS) / len(LENGTHS)
        assert record["tokens_per_second_per_rank"] / record["samples_per_second"] == pytest.approx(tokens, rel=1e-9)
        wanted = flops.total(1, 0) * tokens + flops.total(0, 1) * pairs
        assert record["model_tflops_per_rank"] * 1e12 / record["samples_per_second"] == pytest.approx(wanted, rel=1e-9)


def test_nothing_stays_on_the_model_and_a_second_training_reports_again(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    trainer.train()
    hooks = dict(trainer.model._forward_pre_hooks)
    order = list(trainer.callback_handler.callbacks)
    trainer.train()
    assert training_logs(trainer)[-1].keys() >= SPLIT | SPEED | MEMORY
    assert dict(trainer.model._forward_pre_hooks) == hooks
    assert trainer.callback_handler.callbacks == order
    assert [type(callback) for callback in order[:2]] == [MemoryCallback, ThroughputCallback]
    assert len(set(map(type, order))) == len(order)


def test_training_again_after_an_error_counts_every_batch_once(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, Reporter(fails_at=1), train_sampling_strategy="sequential")
    with pytest.raises(RuntimeError, match="stopped by the test"):
        trainer.train()
    trainer.remove_callback(Reporter)
    trainer.train()
    record = training_logs(trainer)[0]
    ratio = record["tokens_per_second_per_rank"] / record["samples_per_second"]
    assert ratio == pytest.approx(sum(LENGTHS) / len(LENGTHS), rel=1e-9)
    trainer.evaluate()
    owners = [getattr(hook, "__self__", None) for hook in trainer.model._forward_pre_hooks.values()]
    assert not any(isinstance(owner, ThroughputCallback) for owner in owners)


def test_a_loss_that_the_program_logs_by_itself_passes_unchanged(
    trained: tuple[DistTrainer, list[dict[str, Any]]],
) -> None:
    trainer, _ = trained
    trainer.log({"loss": 1.0})
    assert not trainer.state.log_history[-1].keys() & (SPLIT | SPEED | MEMORY)


def test_a_callback_can_be_taken_out(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    trainer.remove_callback(ThroughputCallback)
    trainer.train()
    assert training_logs(trainer)[-1].keys() & (SPLIT | SPEED | MEMORY) == MEMORY


def test_callbacks_do_not_keep_the_trainer_alive() -> None:
    class Stand:
        dist_engine = None
        dist = DistConfig()

    owner = Stand()
    callbacks = [callback for callback in default_callbacks(owner) if isinstance(callback, LogCallback)]
    del owner
    assert callbacks and all(callback.engine is None and callback._trainer() is None for callback in callbacks)


# ---- counting


def counted(config: Any, **inputs: Any) -> tuple[int, int, int]:
    """What a counter makes of one batch."""
    counter = TokenCounter(config)
    counter.add(inputs)
    return counter.read()


def test_tokens_are_counted_by_mask_then_by_pad_token_then_all() -> None:
    config = LlamaConfig(pad_token_id=0, eos_token_id=1)
    ids = torch.tensor([[5, 0, 7, 0], [5, 6, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    assert counted(config, input_ids=ids, attention_mask=mask) == (2, 5, 9 + 4)
    assert counted(config, input_ids=ids) == (2, 4, 4 + 4)
    assert counted(LlamaConfig(pad_token_id=None), input_ids=ids) == (2, 8, 16 + 16)
    # The end token pads: without a mask nobody can tell the two apart.
    assert counted(LlamaConfig(pad_token_id=0, eos_token_id=[0, 9]), input_ids=ids) == (2, 8, 16 + 16)


def test_texts_in_one_row_are_told_apart_by_their_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    ids = torch.full((1, 6), 5)
    assert counted(LlamaConfig(), input_ids=ids, position_ids=positions) == (1, 6, 9 + 4 + 1)


def test_images_give_samples_and_decoders_count_their_labels() -> None:
    assert counted(None, pixel_values=torch.zeros(3, 3, 8, 8), labels=torch.zeros(3)) == (3, 0, 0)
    labels = torch.tensor([[5, 6, -100]])
    encoder = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2)}
    assert counted(transformers.T5Config(), **encoder, labels=labels) == (1, 4, 4)
    assert TrainingFlops.of(transformers.T5Model(transformers.T5Config(d_model=8, d_ff=8, num_layers=1))) is None


def test_flops_follow_the_formula_for_untied_tied_and_frozen_weights() -> None:
    per_layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    body, head = 2 * per_layer + 32, 64 * 32
    for tied in (False, True):
        flops = TrainingFlops.of(tiny_llama(tie_word_embeddings=tied))
        assert flops == TrainingFlops(per_token=6.0 * (body + head), per_pair=12.0 * 2 * 32)
    frozen = tiny_llama()
    frozen.model.requires_grad_(False)
    flops = TrainingFlops.of(frozen)
    assert flops is not None and flops.per_token == 4 * body + 6 * head


def test_a_token_pays_only_for_the_experts_that_it_visits() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2}
    few, many = (TrainingFlops.of(Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=n, **sizes))) for n in (4, 8))
    assert few is not None and many is not None
    assert many.per_token - few.per_token == 6 * 4 * 16  # the router of four more experts


# ---- time and memory


def test_waits_are_taken_out_of_the_phases_but_not_out_of_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 4.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    monkeypatch.setattr(collectives, "_wait_seconds", 5.0)
    clock = HostClock()
    monkeypatch.setattr(collectives, "_wait_seconds", 6.0)
    clock.mark("forward_backward")
    monkeypatch.setattr(collectives, "_wait_seconds", 8.0)
    clock.mark(PAUSE)
    assert clock.read() == {"forward_backward": 3.0, PAUSE: 6.0, WAIT: 1.0}
    assert clock.read() == {}


def test_a_wait_is_counted_once_however_handles_are_nested(monkeypatch: pytest.MonkeyPatch) -> None:
    class Work:
        def wait(self) -> None:
            clock[0] += 2.0

    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    before = collectives.wait_seconds()
    handle = collectives.Handle([collectives.Handle([Work()])], lambda: clock.append(0.0))
    handle.wait()
    handle.wait()
    assert collectives.wait_seconds() - before == 2.0


def test_the_gpu_clock_adds_up_the_time_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self, stream: object) -> None:
            self.at = next(milliseconds)

        def synchronize(self) -> None:
            waited.append(self.at)

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    waited: list[float] = []
    milliseconds = iter([100.0, 300.0, 1100.0, 1600.0, 1900.0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = GpuClock(torch.device("cuda"))
    for phase in ("data", "forward_backward", "data"):
        clock.mark(phase)
    assert clock.read() == pytest.approx({"data": 0.7, "forward_backward": 0.8})
    clock.mark("optimizer")
    assert clock.read() == pytest.approx({"optimizer": 0.3})
    assert waited == [1600.0, 1900.0]


def test_peak_memory_rises_with_an_allocation_and_falls_when_reset() -> None:
    reset_peak(CPU)
    before = peak_nbytes(CPU)
    block = torch.ones(64 << 20, dtype=torch.uint8)
    high = peak_nbytes(CPU)
    assert high - before > 48 << 20
    del block
    reset_peak(CPU)
    if peak_nbytes(CPU) == high:
        pytest.skip("this kernel does not let the peak be reset")
    assert peak_nbytes(CPU) < high - (32 << 20)


# ---- the start-up report


class Lines(logging.Handler):
    """The start-up reports that a logger was given."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the reports."""
        if "start-up report" in record.getMessage():
            self.reports.append(record.getMessage())


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """Everything that hf_dist and transformers say, with transformers at INFO."""
    monkeypatch.setattr(log, "_said", set())
    handler = Lines()
    loggers = [log.logger, logging.getLogger("transformers")]
    verbosity, level = transformers.logging.get_verbosity(), log.logger.level
    transformers.logging.set_verbosity_info()
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)
    transformers.logging.set_verbosity(verbosity)
    log.logger.setLevel(level)


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING], ids=["own logger speaks", "own logger kept quiet"])
def test_the_start_up_report_is_shown_once_for_each_configuration(tmp_path: Path, lines: Lines, level: int) -> None:
    log.logger.setLevel(level)
    trainer = trainer_in(tmp_path, max_steps=1)
    trainer.train()
    trainer.train()
    assert len(lines.reports) == 1
    other = trainer_in(
        tmp_path, dist_config={"zero_optimization": {"stage": 1}}, gradient_accumulation_steps=1, max_steps=1
    )
    other.train()
    assert len(lines.reports) == 2
    assert lines.reports[0] != lines.reports[1]
    assert all(len(report.splitlines()) < 45 for report in lines.reports)


# ---- two ranks


def train_one_rank(folder: Path) -> None:
    """Train under torchrun; rank 1 holds more memory. Writes the training log."""
    rank = int(os.environ["RANK"])
    ballast = torch.ones((rank * 256) << 20, dtype=torch.uint8)
    trainer = trainer_in(folder, max_steps=4)
    trainer.train()
    (folder / f"log-{rank}.json").write_text(json.dumps(training_logs(trainer)), encoding="utf-8")
    del ballast


def test_two_ranks_agree_on_the_peak_and_wait_for_each_other(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(REPO)}
    done = forked.run([*command, str(tmp_path)], env=environment, timeout=240)
    assert done.returncode == 0, done.stdout
    logs = [json.loads((tmp_path / f"log-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert len(logs[0]) == len(logs[1]) == 2
    for first, second in zip(*logs, strict=True):
        assert first["memory_peak_gb"] == second["memory_peak_gb"] > 0.25
        assert first["memory_peak_rank"] == second["memory_peak_rank"] == 1
        assert first["time_communication_wait_percent"] > 0
        for record in (first, second):
            assert sum(record[key] for key in SPLIT) == pytest.approx(100)
    assert done.stdout.count("start-up report") == 1


if __name__ == "__main__":
    train_one_rank(Path(sys.argv[1]))
