"""The replicas of a server, as one of its ranks sees them: a thread for each link brings what arrives, in whole calls."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hf_dist.dist.link import Link, Message

__all__ = ["Guest", "Guests"]


class Guest:
    """One replica: a link to each of its ranks."""

    def __init__(self, number: int, ranks: int, session: str, news: threading.Condition) -> None:
        self.number = number
        self.session = session
        """Tells it from an earlier one with the same number."""
        self.ranks = ranks
        self.inbox: dict[int, Message] = {}
        """Rank of the replica -> the message that waits for an answer."""
        self.gone = ""
        """Why there are no more messages; "" while there may be."""
        self.left = False
        """Whether it said so."""
        self.arrived = 0
        """When its last call was complete, in the order of all."""
        self._links: dict[int, Link] = {}
        self._news = news

    @property
    def is_complete(self) -> bool:
        """Whether all of its ranks have sent their part of a call."""
        return len(self.inbox) == self.ranks and not self.gone

    @property
    def is_over(self) -> bool:
        """Whether it has left or is gone."""
        return self.left or bool(self.gone)

    def listen(self, rank: int, connect: Callable[[], Link], complete: Callable[[Guest], None]) -> None:
        """Of a thread: take one message after another; each waits in `inbox` until it was answered."""
        try:
            link = connect()
            self._links[rank] = link
            while not self.is_over:
                message = link.receive()
                with self._news:
                    self.inbox[rank] = message
                    complete(self)
                    self._news.notify_all()
                    self._news.wait_for(lambda: rank not in self.inbox or self.is_over)
        except Exception as error:  # whatever it is, this replica is lost, and the others are not
            self.lose(str(error))

    def lose(self, reason: str) -> None:
        """No message of it counts any more. Any thread."""
        with self._news:
            self.gone = self.gone or reason
            self.inbox.clear()
            self._news.notify_all()

    def close(self) -> None:
        """End the links: a rank that still waits for an answer finds that there is none."""
        for link in list(self._links.values()):
            link.close()

    def answer(self, answers: Callable[[int], Message | None]) -> None:
        """Answer the call of every rank of it, `answers(rank)`; None ends the link. A rank that is gone is no error."""
        for rank in range(self.ranks):
            message = answers(rank)
            try:
                if message is not None:
                    self._links[rank].send(*message)
            except Exception as error:
                self.lose(str(error))
                return
        with self._news:
            self.inbox.clear()
            self._news.notify_all()


class Guests:
    """All replicas of a server. The newest with a number is the one that counts."""

    def __init__(self) -> None:
        self.news = threading.Condition()
        """Notified whenever a message or a replica comes or goes."""
        self.by_number: dict[int, Guest] = {}
        self._arrivals = 0

    def expect(self, number: int, ranks: int, session: str, connect: Callable[[int], Link]) -> None:
        """A replica of `ranks` ranks comes; `connect(rank)` blocks for a link to one of them. Any thread."""
        with self.news:
            guest = Guest(number, ranks, session, self.news)
            before, self.by_number[number] = self.by_number.get(number), guest
        if before is not None:
            before.lose("another job came with its number")
            before.close()
        for rank in range(ranks):
            threading.Thread(
                target=guest.listen, args=(rank, lambda rank=rank: connect(rank), self._completed),
                name=f"hf_dist replica {number}", daemon=True,
            ).start()  # fmt: skip

    def _completed(self, guest: Guest) -> None:
        if guest.is_complete:
            self._arrivals += 1
            guest.arrived = self._arrivals

    def first(self) -> Guest | None:
        """The one whose call was complete first; None if there is none. With `news` held."""
        waiting = [guest for guest in self.by_number.values() if guest.is_complete]
        return min(waiting, key=lambda guest: guest.arrived, default=None)

    def wait_longer(self, guest: Guest) -> None:
        """Let the others go first: a part of this one's call is still on its way to another rank."""
        with self.news:
            self._arrivals += 1
            guest.arrived = self._arrivals
