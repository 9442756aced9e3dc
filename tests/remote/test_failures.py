"""What goes wrong in one role ends all of them: named once, with the role, and nothing hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.covering import some_of
from tests.remote.jobs import save_models
from tests.workers.launcher import launch

SAID = {
    "no_token": ("RemoteError", "role teacher, rank 0: IndexError", "[teacher 0]"),
    "teacher_killed": ("lost the connection to data rank 0 of role teacher",),
    "teacher_stopped": (
        "trainer rank 1 has waited 2 s for role teacher to answer call 3",
        "data rank 0 of role teacher did not answer in time",
    ),
    "trainer_raises": ("[trainer rank 1] KeyError: 'of the script'",),
    "trainer_killed": ("lost the connection to data rank 1 of the asking role",),
}


@pytest.mark.parametrize("case", some_of(SAID, "no_token", "teacher_killed"))
def test_every_role_ends_and_the_reason_is_named(case: str, tmp_path: Path) -> None:
    save_models(str(tmp_path))
    (tmp_path / "job").mkdir()
    is_stopped = case == "teacher_stopped"  # it ends when the launcher kills it
    codes, output, _ = launch(case, tmp_path / "job", 3, 120, "tests.workers.asking", sends_sigterm=is_stopped)
    assert None not in codes, "hangs\n" + output
    assert 0 not in codes[1:], output  # rank 0 waits for nobody but the teacher
    for words in SAID[case]:
        assert words in output, output


def test_a_job_with_roles_ends_when_the_trainer_has(tmp_path: Path) -> None:
    save_models(str(tmp_path))
    (tmp_path / "job").mkdir()
    codes, output, _ = launch("nothing_wrong", tmp_path / "job", 3, 120, "tests.workers.asking")
    assert codes == [0, 0, 0], output
    assert "role teacher: answered 4 calls; the trainer has ended" in output and "Traceback" not in output
