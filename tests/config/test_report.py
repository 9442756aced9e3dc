"""The table for the log."""

from __future__ import annotations

from pathlib import Path

from hf_dist.config import format_table, load_config, resolve_without_trainer


def test_the_table_shows_set_values_with_sources_and_idle_keys_once(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("""{
  "_comment": "for the small box",
  "train_batch_size": 32,
  "train_micro_batch_size_per_gpu": 4,
  "steps_per_print": 10,
  "wall_clock_breakdown": true,
  "bfloat16": {"enabled": true},
  "zero_optimization": {"stage": 3, "overlap_comm": true, "contiguous_gradients": true,
    "mics_shard_size": -1}
}""")
    assert format_table(resolve_without_trainer(load_config(path), data_ranks=2, hidden_size=64)) == (
        f"Configuration from {path}\n"
        "  train_batch_size                32    line 3\n"
        "  train_micro_batch_size_per_gpu  4     line 4\n"
        "  bf16.enabled                    true  line 7\n"
        "  zero_optimization.stage         3     line 8\n"
        "  zero_optimization.overlap_comm  true  line 8\n"
        "  gradient_clipping               0.0   absent <- default\n"
        "  gradient_accumulation_steps     4     absent <- the other batch sizes\n"
        "Accepted without effect:\n"
        "  steps_per_print: use logging_steps of TrainingArguments\n"
        "  wall_clock_breakdown: the log always has the split of the time\n"
        "  zero_optimization.contiguous_gradients: a detail of DeepSpeed's implementation\n"
        "Differs from DeepSpeed:\n"
        "  gradient_clipping: not in the file, and nothing clips; DeepSpeed since 0.19 may clip at 1.0, its new default. "
        'As there: write "gradient_clipping": 1.0, or 0.0 to say so\n'
        "  communication_data_type: not in the file: gradients are sent in fp32 (twice the bytes); DeepSpeed sends them in "
        'bf16. As there: write "bf16"\n'
        "  data_types.grad_accum_dtype: not in the file: gradients of microbatches are summed in fp32; DeepSpeed sums them in "
        'the dtype of the weights. As there: write "bf16"'
    )


def test_a_dict_without_settings_says_so() -> None:
    assert format_table(load_config({"gradient_clipping": "auto"})).splitlines()[0] == "Configuration from a dict"
    table = format_table(load_config({})).splitlines()
    assert table[0] == "Configuration from a dict: defaults only" and len(table) == 3
