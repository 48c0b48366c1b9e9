"""Delay frames between two interfaces, to emulate a link's latency on kernels without netem.

python -m tools.netlab.delay FROM,TO,SECONDS,JITTER ...

Frames that arrive at FROM leave through TO after SECONDS and up to JITTER more, in their order. Frames that arrive at
TO leave through FROM at once. Packets keep their offload state (checksum and segmentation left to the card).
"""

import random
import select
import socket
import sys
import time
from collections import deque

# From linux/if_packet.h and asm-generic/socket.h; Python has no names for them.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
ETH_P_ALL = 3
QUEUE_BYTES = 64 * 2**20
# Upper bound of a frame's bytes, with its header and offload header.
LARGEST = 2**17
# Most frames to read from one interface before the next one.
TURN = 64


class Link:
    """A link with one delayed and one immediate direction. delay, jitter: seconds."""

    def __init__(self, here: str, there: str, delay: float, jitter: float) -> None:
        self.here, self.there = _open(here), _open(there)
        self._delay, self._jitter = delay, jitter
        self._random = random.Random(here)
        self._held: deque[tuple[float, bytes]] = deque()

    @property
    def due(self) -> float:
        """Time at which the next frame leaves; infinity if there is none."""
        return self._held[0][0] if self._held else float("inf")

    def take(self, ready: set[socket.socket]) -> None:
        """Queue the frames of the delayed direction, and forward those of the other one."""
        if self.here in ready:
            for frame in _frames(self.here):
                due = time.monotonic() + self._delay + self._random.uniform(0, self._jitter)
                last = self._held[-1][0] if self._held else due
                self._held.append((max(due, last), frame))
        if self.there in ready:
            for frame in _frames(self.there):
                self.here.send(frame)

    def release(self) -> None:
        """Forward the frames whose delay is over."""
        while self._held and self._held[0][0] <= time.monotonic():
            self.there.send(self._held.popleft()[1])


def main(words: list[str]) -> None:
    """Delay frames until killed."""
    links = []
    for word in words:
        here, there, delay, jitter = word.split(",")
        links.append(Link(here, there, float(delay), float(jitter)))
    sockets = [end for link in links for end in (link.here, link.there)]
    print("ready", flush=True)
    while True:
        due = min(link.due for link in links)
        wait = None if due == float("inf") else max(0.0, due - time.monotonic())
        ready = set(select.select(sockets, [], [], wait)[0])
        for link in links:
            link.take(ready)
            link.release()


def _open(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    for option in (PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING):
        end.setsockopt(SOL_PACKET, option, 1)
    for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        end.setsockopt(socket.SOL_SOCKET, option, QUEUE_BYTES)
    end.bind((interface, ETH_P_ALL))
    return end


def _frames(end: socket.socket) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < TURN:
        try:
            frames.append(end.recv(LARGEST, socket.MSG_DONTWAIT))
        except BlockingIOError:
            break
    return frames


if __name__ == "__main__":
    main(sys.argv[1:])
