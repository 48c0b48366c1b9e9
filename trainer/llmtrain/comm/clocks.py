"""How far the clocks of two machines differ, as messages between them show."""

from dataclasses import dataclass
from math import inf

# Seconds up to which clocks count as equal: messages may be late by less, and times are compared more finely.
_EQUAL = 1.0


@dataclass(frozen=True)
class ClockOffset:
    """What is known of how far this machine's clock is ahead of another's: the bounds, in seconds."""

    least: float = -inf
    most: float = inf

    def narrowed(self, sent: float, looked: float, found: float) -> "ClockOffset":
        """Return the bounds with what a message tells. sent: when it was sent, by the other clock. looked, found: times
        of this clock at which it was not there yet, and was."""
        return ClockOffset(max(self.least, looked - sent), min(self.most, found - sent))

    @property
    def seconds(self) -> float:
        """The least offset within the bounds; 0 where the clocks may be equal."""
        nearest = min(max(0.0, self.least), self.most)
        return nearest if abs(nearest) > _EQUAL else 0.0
