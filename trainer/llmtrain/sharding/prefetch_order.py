"""The order in which a pass needs its units: recorded the first time, looked ahead in ever after (MiCS, section 4)."""

# Uses that are looked at for each unit wanted: at a turn of passes the same few come twice.
WINDOW = 4


class PrefetchOrder:
    """A pass (a training step, or a forward pass alone) needs its units in the order in which the last one did."""

    def __init__(self) -> None:
        self._uses: list[tuple[str, bool]] = []
        self._place = 0
        self._known = False

    def start(self) -> None:
        """Begin a pass."""
        self._known = bool(self._uses)
        self._place = 0

    def use(self, unit: str, backward: bool = False) -> None:
        """Note that the pass needs `unit` now. Where it leaves the known order, the rest is recorded anew."""
        if self._known and self._uses[self._place : self._place + 1] != [(unit, backward)]:
            self._known = False
            del self._uses[self._place :]
        if not self._known:
            self._uses.append((unit, backward))
        self._place += 1

    def ahead(self, count: int, direction: bool | None = None) -> list[str]:
        """Return the next `count` units that this pass needs, each once; none while it is recorded.

        direction: only up to where it is no longer backward (True), or begins to be (False).
        """
        found: list[str] = []
        for unit, backward in self._uses[self._place : self._place + WINDOW * count] if self._known else []:
            if len(found) == count or direction not in (None, backward):
                break
            if unit not in found:
                found.append(unit)
        return found
