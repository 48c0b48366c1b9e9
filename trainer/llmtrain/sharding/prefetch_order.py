"""The order in which a pass uses its units, recorded in the first pass and used to prefetch later (MiCS, section 4)."""

# Uses to search for each unit that is prefetched: when a backward pass begins, the same few units come twice.
WINDOW = 4


class PrefetchOrder:
    """The units of a pass (a training step or a forward pass), in the order of the last pass."""

    def __init__(self) -> None:
        self._uses: list[tuple[str, bool]] = []
        self._place = 0
        self._known = False

    def start(self) -> None:
        """Begin a pass."""
        self._known = bool(self._uses)
        self._place = 0

    def use(self, unit: str, backward: bool = False) -> None:
        """Record that the pass uses `unit` now. If it differs from the known order, record the rest again."""
        if self._known and self._uses[self._place : self._place + 1] != [(unit, backward)]:
            self._known = False
            del self._uses[self._place :]
        if not self._known:
            self._uses.append((unit, backward))
        self._place += 1

    def ahead(self, count: int, direction: bool | None = None) -> list[str]:
        """Return the next `count` units of the pass, each once; none while the order is being recorded.

        direction: only up to where it is no longer backward (True), or begins to be (False).
        """
        found: list[str] = []
        for unit, backward in self._uses[self._place : self._place + WINDOW * count] if self._known else []:
            if len(found) == count or direction not in (None, backward):
                break
            if unit not in found:
                found.append(unit)
        return found
