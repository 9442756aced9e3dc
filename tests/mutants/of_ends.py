"""Faults in who may write where, in what another program's checkpoint holds, and in how jobs end."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_ENDS = "dist/test_ends.py::test_"

MUTANTS: list[Mutant] = [
    # ---- folders
    Mutant(
        "a process number that came again is the first job's",
        "checkpoint/lock.py",
        "        return identity == said\n",
        '        return identity != ""\n',
        ("checkpoint/test_lock.py",),
    ),
    Mutant(
        "a job on another machine is dead",
        "checkpoint/lock.py",
        "        if now != first:\n            return True\n",
        "",
        ("checkpoint/test_lock.py",),
    ),
    Mutant(
        "a claim shows no sign of life",
        "checkpoint/lock.py",
        "                        os.utime(path)\n",
        "                        pass\n",
        ("checkpoint/test_lock.py",),
    ),
    Mutant(
        "a claim that another job made meanwhile is replaced",
        "checkpoint/lock.py",
        "        if _read(path) != other:\n            return False\n",
        "",
        ("checkpoint/test_lock.py",),
    ),
    Mutant(
        "what another job writes is cleaned up",
        "checkpoint/publish.py",
        "            if lock.is_claimed(lock.writing_of(final)):\n                continue\n",
        "",
        ("checkpoint/test_lock.py", "checkpoint/test_lineage.py"),
    ),
    Mutant(
        "a user's copy of a checkpoint under another number is rotated away",
        "checkpoint/folder.py",
        "if not p.is_symlink() and not _is_copy(p)]",
        "if not p.is_symlink()]",
        ("checkpoint/test_lineage.py",),
    ),
    Mutant(
        "a second job may train in the same folder",
        "hf/checkpointing.py",
        "                lock.claim(writer)\n",
        "                pass\n",
        (_ENDS + "a_second_job_in_the_folder_of_the_first_ends_and_the_first_goes_on",),
    ),
    Mutant(
        "the files of a save into a folder with others replace a manifest first",
        "checkpoint/publish.py",
        "sorted(files, key=lambda path: path == ready / MANIFEST)",
        "sorted(files, key=lambda path: path != ready / MANIFEST)",
        ("checkpoint/test_publish.py",),
    ),
    # ---- checkpoints of other programs
    Mutant(
        "states that a folder does not hold start empty without a word",
        "checkpoint/foreign.py",
        "    if without and imported.program != TRAINER:\n",
        "    if False:\n",
        ("checkpoint/test_foreign.py",),
    ),
    Mutant(
        "states of another optimizer are taken",
        "checkpoint/foreign.py",
        "    if not own <= found:\n",
        "    if False:\n",
        ("checkpoint/test_foreign.py",),
    ),
    Mutant(
        "the universal folder that sorts last is read",
        "checkpoint/foreign.py",
        "(p.parent == directory, _step_in(p.parent.name), p.parent.name)",
        "(p.parent == directory, p.parent.name)",
        ("checkpoint/test_foreign.py",),
    ),
    Mutant(
        "tensors that the model does not have are dropped",
        "checkpoint/check_names.py",
        "    more = [n for n in names if n not in known and",
        "    more = [n for n in () if n not in known and",
        ("checkpoint/test_foreign.py",),
    ),
    Mutant(
        "weights of another program are read under the names in memory only",
        "hf/resuming.py",
        "plan = plan if plan is not None else self._plan_of_files(engine, directory)",
        "plan = plan",
        ("checkpoint/test_foreign.py",),
    ),
    # ---- ends
    Mutant(
        "Ctrl-C interrupts a save between two collectives",
        "dist/raise_on_all_ranks.py",
        "            signal.signal(number, note)\n",
        "            pass\n",
        (_ENDS + "an_interrupt_in_a_save_waits_for_its_end",),
    ),
    Mutant(
        "SIGTERM is heard by a main thread that runs Python only",
        "hf/stop_signal.py",
        "            self._ear = ears\n",
        "            pass\n",
        (_ENDS + "a_job_that_hangs_ends_when_it_is_told_and_names_its_last_checkpoint",),
    ),
    Mutant(
        "the last rank does not hear what rank 0 has judged",
        "dist/watchdog/thread.py",
        '                if self.rank in message.get("alone", ()):\n',
        '                if self._collector is None and self.rank in message.get("alone", ()):\n',
        (_ENDS + "one_rank_alone_without_memory_does_not_start_again_by_itself",),
    ),
    Mutant(
        "the plan of a lack of memory runs the hooks of the live model",
        "planning/out_of_memory.py",
        "planner = planner_alone(engine, micro, seq)",
        "planner = __import__('hf_dist.planning.running', fromlist=['x']).planner_for(engine, micro, seq)",
        (_ENDS + "out_of_memory_between_two_steps_is_told_with_a_plan_and_ends_the_job",),
    ),
    Mutant(
        "the port of another program is taken for a store",
        "dist/rendezvous.py",
        "            return False\n    return True\n\n\ndef _tell_who_is_missing",
        "            return False\n    return False\n\n\ndef _tell_who_is_missing",
        ("dist/test_rendezvous.py",),
    ),
    Mutant(
        "every rank prints the traceback of an error of all",
        "dist/excepthook.py",
        "        if told is None or told == rank:\n",
        "        if True:\n",
        (_ENDS + "an_error_of_every_rank_is_shown_once_with_each_ranks_own_words",),
    ),
    Mutant(
        "the bytes of a single element of a wider tensor are asked of a view",
        "tensors/checksum.py",
        "flat if flat.stride() == (1,) else",
        "flat if flat.is_contiguous() else",
        ("dist/test_raise_on_all_ranks.py",),
    ),
    Mutant(
        "evaluations leave their loaders behind",
        "hf/trainer.py",
        "            self._forget_loader(loader)\n",
        "",
        ("hf/test_repeated_trainings.py",),
    ),
]
