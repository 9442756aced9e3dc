"""`hf-dist config new`: what it writes passes `config check`, whatever is chosen; what does not go together is not written."""

from __future__ import annotations

import base64
import itertools
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_dist.config import axes_of, load_config, read_config
from hf_dist.config.load import examine
from hf_dist.config.new_file import Choices, new_file
from hf_dist.errors import ConfigError
from hf_dist.tools.cli import app, config_new
from tests.config.test_json_schema import fits
from tests.tools.test_written import said

FLAGS = list(
    itertools.product((0, 1, 2, 3), ("bf16", "fp16", "fp32"), ("none", "optimizer", "all"), (1, 2), (1, 2), (1, 2))
)


def is_possible(choices: Choices) -> bool:
    """Optimizer state that is whole on every rank stays there; weights that are whole, too."""
    least = {"none": 0, "optimizer": 1, "all": 3}[choices.offload]
    return choices.stage >= least


def test_every_choice_gives_a_valid_file_in_which_each_key_has_an_effect_or_is_refused() -> None:
    for flags in FLAGS:
        choices = Choices(*flags)
        if not is_possible(choices):
            with pytest.raises(ConfigError, match="offload"):
                load_config(new_file(choices, "x"))
            continue
        text = new_file(choices, "schema.json")
        config, problems = examine(text)
        assert problems == [] and [note for note in config.notes if note.kind == "idle"] == [], choices
        data = read_config(text).data
        assert data["$schema"] == "schema.json" and fits(data), choices
        zero = config.zero_optimization
        assert zero.stage == choices.stage
        moved = (zero.offload_optimizer.device, zero.offload_param.device)
        assert moved == {"none": ("none",) * 2, "optimizer": ("cpu", "none"), "all": ("cpu", "cpu")}[choices.offload]
        assert (config.bf16.enabled is True, config.fp16.enabled is True) == {
            "bf16": (True, False), "fp16": (False, True), "fp32": (False, False)
        }[choices.precision]  # fmt: skip
        axes = axes_of(config, 2 * choices.together)
        sizes = (config.tensor_parallel.autotp_size, config.sequence_parallel_size, config.pipeline.stages)
        assert sizes == (choices.tensor, choices.sequence, choices.pipeline) and axes.size("data") == 2


def test_every_value_is_below_a_comment() -> None:
    lines = new_file(Choices(3, "fp16", "all", 2, 2, 2), "x").splitlines()
    values = [
        n
        for n, line in enumerate(lines)
        if line.lstrip().startswith('"') and not line.endswith("{") and "$schema" not in line
    ]
    assert len(values) == 13 and all(lines[n - 1].lstrip().startswith("// ") for n in values)
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("comment", ["// a", "# a", "/* a\n { */"])
def test_a_text_that_begins_with_a_comment_is_no_path(comment: str) -> None:
    text = f'{comment}\n{{"zero_optimization": {{"stage": 2}}}}'
    assert load_config(text).zero_optimization.stage == 2
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert load_config(encoded).zero_optimization.stage == 2


def test_options_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my file.json"
    words = ["config", "new", str(path), "--ranks", "8", "--stage", "2", "--offload", "optimizer", "--tp", "2"]
    code, out, err = said(words, capsys)
    assert (code, err) == (0, "")
    last = out.splitlines()[-1]
    assert last == f"  torchrun --nproc_per_node 8 -m hf_dist.run --config '{path}' train.py"
    assert said(["config", "check", str(path), "--world-size", "8"], capsys)[0] == 0
    before = path.read_text()
    code, out, err = said(["config", "new", str(path)], capsys)
    assert code == 1 and err == f"FILE: {path} is there already. Pass --force, or name another file.\n"
    assert path.read_text() == before
    assert said(["config", "new", str(path), "--force"], capsys)[0] == 0
    assert load_config(path).zero_optimization.stage == 3


def test_ranks_that_the_axes_do_not_divide_are_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(["config", "new", str(tmp_path / "x.json"), "--ranks", "6", "--tp", "4"], capsys)
    assert code == 1 and "autotp_size" in err and out == "" and list(tmp_path.iterdir()) == []


def test_a_terminal_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is none of the choices is asked again; Enter takes the default."""
    monkeypatch.setattr(config_new, "_in_terminal", lambda: True)
    path = tmp_path / "x.json"
    done = CliRunner().invoke(app, ["config", "new", str(path)], input="7\n1\n\n\n\n0\n\n2\n")
    assert done.exit_code == 0, done.output
    config = load_config(path)
    assert (config.zero_optimization.stage, config.pipeline.stages, config.bf16.enabled) == (1, 2, True)
