"""What waits for one process of the service, and whose turn it is.

Knows calls and users; knows nothing about processes. Where a call needs what another one's coming would push out (a
model for which there is no room beside it, a question that must be prepared anew), turns by call would bring and push
out all the time. So what was brought stays for as long as bringing it took, while calls that need it are there: then a
process is busy bringing for at most about half of its time, and nobody waits longer than that for his turn.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mathinterp.service.host import Answer

LONGEST_STAY = 60.0  # seconds


@dataclass(eq=False)
class Call:
    """Something to compute, for ``user``."""

    user: str
    kind: str
    model: str  # fingerprint or name, for status
    work: dict[str, Any] = field(repr=False)
    session: str | None = None
    future: "Future[Answer]" = field(default_factory=Future, repr=False)
    losses: int = 0


class Turns:
    """Calls that wait, in a queue for each user."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Call]] = OrderedDict()  # whose turn is next: first
        self._stays_until = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def calls(self) -> list[Call]:
        """All that wait."""
        return [call for queue in self._queues.values() for call in queue]

    def add(self, call: Call, *, first: bool = False) -> None:
        """Behind the other calls of its user, or before them."""
        queue = self._queues.setdefault(call.user, deque())
        (queue.appendleft if first else queue.append)(call)

    def remove(self, call: Call) -> None:
        """It waits no more, if it did."""
        queue = self._queues.get(call.user, deque())
        if call in queue:
            queue.remove(call)
        if not queue:
            self._queues.pop(call.user, None)

    def clear(self) -> None:
        """Nothing waits."""
        self._queues.clear()

    def brought(self, seconds: float, now: float) -> None:
        """A call was answered for which something had to be brought, and took so long."""
        self._stays_until = now + min(seconds, LONGEST_STAY)

    def next(self, at_hand: Callable[[Call], bool], now: float) -> Call | None:
        """The first call of the user whose turn it is, who then is the last; None: nothing waits.

        Args:
            at_hand: whether all that a call needs is there; while what was brought stays, such calls come first.
            now: seconds of the clock by which ``brought`` was told.
        """
        waiting = [call for call in self.calls() if not call.future.cancelled()]
        stays = now < self._stays_until
        chosen = next((call for call in waiting if stays and at_hand(call)), waiting[0] if waiting else None)
        if chosen is None:
            self.clear()
            return None
        self.remove(chosen)
        if chosen.user in self._queues:
            self._queues.move_to_end(chosen.user)
        return chosen
