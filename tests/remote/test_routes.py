"""Who answers whom, with any number of ranks on both sides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_dist.remote.routes import rounds, server_of, students_of

COUNTS = st.integers(1, 40)


@given(COUNTS, COUNTS)
def test_every_student_has_one_server_and_no_server_much_more_than_another(students: int, servers: int) -> None:
    lists = [students_of(server, students, servers) for server in range(servers)]
    assert sorted(s for each in lists for s in each) == list(range(students))
    assert all(server_of(s, students, servers) == server for server, each in enumerate(lists) for s in each)
    assert rounds(students, servers) == max(map(len, lists)) == -(-students // servers)
