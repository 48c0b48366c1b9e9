"""The order in which a pass needs its units: recorded the first time, looked ahead in ever after (MiCS, section 4)."""


class UseOrder:
    """A pass (a training step, or a forward pass alone) needs its units in the order in which the last one did."""

    def __init__(self) -> None:
        self._uses: list[str] = []
        self._place = 0
        self._known = False

    def start(self) -> None:
        """Begin a pass."""
        self._known = bool(self._uses)
        self._place = 0

    def use(self, unit: str) -> None:
        """Note that the pass needs `unit` now. Where it leaves the known order, the rest is recorded anew."""
        if self._known and self._uses[self._place : self._place + 1] != [unit]:
            self._known = False
            del self._uses[self._place :]
        if not self._known:
            self._uses.append(unit)
        self._place += 1

    def ahead(self, count: int) -> list[str]:
        """Return the next `count` units that this pass needs, each once; none while it is recorded."""
        found: list[str] = []
        place = self._place if self._known else len(self._uses)
        while len(found) < count and place < len(self._uses):
            if self._uses[place] not in found:
                found.append(self._uses[place])
            place += 1
        return found
