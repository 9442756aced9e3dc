"""The JSON configuration: DeepSpeed's schema read once, checked as a whole, resolved against TrainingArguments."""

from hf_dist.config.accelerate import LauncherSettings
from hf_dist.config.auto import resolve, resolve_without_trainer, with_disagreements, with_elastic_batch
from hf_dist.config.batch import BatchSizes, solve_batch
from hf_dist.config.differs import Difference, differences
from hf_dist.config.findings import Note
from hf_dist.config.load import ConfigDocument, canonical, examine, load_config, read_config, similar_files
from hf_dist.config.report import format_differences, format_table
from hf_dist.config.schema import DistConfig
from hf_dist.config.sources import AutoSources, hidden_size_of
from hf_dist.config.topology import axes_of
from hf_dist.config.values import settled, shown

__all__ = [
    "AutoSources",
    "BatchSizes",
    "ConfigDocument",
    "Difference",
    "DistConfig",
    "LauncherSettings",
    "Note",
    "axes_of",
    "canonical",
    "differences",
    "examine",
    "format_differences",
    "format_table",
    "hidden_size_of",
    "load_config",
    "read_config",
    "resolve",
    "resolve_without_trainer",
    "settled",
    "shown",
    "similar_files",
    "solve_batch",
    "with_disagreements",
    "with_elastic_batch",
]
