"""The length of training batches at each step, according to the `curriculum_learning` section.

Source: DeepSpeed runtime/data_pipeline/curriculum_scheduler.py.
"""

from __future__ import annotations

import math

from hf_dist.config.findings import Findings
from hf_dist.config.training_sections import CurriculumConfig

_NEEDED = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
}
_EXAMPLES = {"total_curriculum_step": "10000", "difficulty_step": "8", "root_degree": "2"}
_EXAMPLES |= {"difficulty": "[64, 128]", "max_step": "[1000]"}


def length_at(section: CurriculumConfig, finished_steps: int) -> int:
    """Maximum number of tokens per row in the optimizer step that follows `finished_steps`."""
    how, step = section.schedule_config, finished_steps + 1
    if section.schedule_type == "fixed_discrete":
        assert how.difficulty is not None and how.max_step is not None  # `check_curriculum`
        stage = next((i for i, last in enumerate(how.max_step) if step <= last), len(how.difficulty) - 1)
        return how.difficulty[stage]
    assert how.total_curriculum_step and how.difficulty_step and section.max_difficulty
    degree = how.root_degree or 1 if section.schedule_type == "fixed_root" else 1
    grown = (step / how.total_curriculum_step) ** (1.0 / degree) * (section.max_difficulty - section.min_difficulty)
    length = math.floor(grown + section.min_difficulty)
    first = -(-section.min_difficulty // how.difficulty_step) * how.difficulty_step
    return min(max(length - length % how.difficulty_step, first), section.max_difficulty)


def check_curriculum(section: CurriculumConfig, findings: Findings) -> None:
    """Record values that the schedule needs but lacks."""
    if not section.enabled:
        return
    where, how = "curriculum_learning", section.schedule_config
    wrong = {problem.path for problem in findings.problems}
    for key in _NEEDED[section.schedule_type]:
        path = f"{where}.schedule_config.{key}"
        if getattr(how, key) is None and findings.spelled(path) not in wrong:
            fix = f'Add "{key}": {_EXAMPLES[key]}.'
            findings.problem(path, f'is missing; "{section.schedule_type}" needs it', fix)
    if section.schedule_type != "fixed_discrete" and section.max_difficulty is None:
        findings.problem(f"{where}.max_difficulty", "is missing: tokens at the end", 'Add "max_difficulty": 1024.')
    lengths, lasts = how.difficulty or (), how.max_step or ()
    if section.schedule_type == "fixed_discrete" and lengths and lasts and len(lengths) != len(lasts) + 1:
        expected = f"has {len(lasts)} numbers for {len(lengths)} lengths, which need one less"
        fix = "Write the last step of every length but the last one."
        findings.problem(f"{where}.schedule_config.max_step", expected, fix, found=list(lasts))
