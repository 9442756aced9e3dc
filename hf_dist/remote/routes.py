"""Which data rank of a serving role answers which data rank of the asking role, and in which round. Pure arithmetic."""

from __future__ import annotations

from datetime import timedelta

__all__ = ["END", "LOST", "PATIENCE", "SEED", "failure_of", "rounds", "server_of", "students_of"]

SEED = "hf_dist_seed"
"""The option of a forward in training mode: of its dropout."""
END = "end"
"""The call after which none follows."""
LOST = "lost"
"""In place of a call of a data rank that is gone; no end sends it."""
PATIENCE = timedelta(days=7)
"""How long a role waits for the next call: users tokenise, evaluate and generate between two."""


def failure_of(role: str) -> str:
    """The key in the store of the start under which a role writes its first error."""
    return f"roles/{role}/failed"


def server_of(student: int, students: int, servers: int) -> int:
    """The server of a student: neighbours share one. With more servers than students, some have none."""
    return student * servers // students


def students_of(server: int, students: int, servers: int) -> list[int]:
    """Those that a server answers, in the order of its rounds."""
    return [s for s in range(students) if server_of(s, students, servers) == server]


def rounds(students: int, servers: int) -> int:
    """How many forwards a call of all students takes. A server with fewer students repeats a row, because a forward of sharded
    weights needs all ranks of the role."""
    return max(len(students_of(server, students, servers)) for server in range(servers))
