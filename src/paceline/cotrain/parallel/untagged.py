"""A source's way where messages have no tags, as with NCCL: a group of its own, on which order alone tells them apart.

NCCL itself has not been run here. What was run is these classes on groups of gloo with every tag 0, which shows that
order suffices. With NCCL, besides:

- a wait for a payload holds the current stream and not the process, so ``late_s`` counts the launches alone;
- a credit says that the use of a slot was launched. The receive that follows is ordered behind that use by the stream
  on which both were called, so ``use`` is to stay on one stream; ``stalls`` are those of the process;
- a posted receive holds some of the device until its payload comes, so the kernels of all communicators need room
  beside each other, and nothing may wait for the whole device in the midst of a step;
- a step that was broken off leaves a group out of order: make the ways anew.
"""

import torch.distributed as dist
from torch import Tensor

from paceline.cotrain.parallel.links import Counters, Way
from paceline.cotrain.parallel.tagged import Receiver, Sender


class OrderedSender(Sender):
    """A ``Sender`` whose payloads go over ``own``, a group of the way's two ranks; credits go over ``group``."""

    def __init__(self, way: Way, group: dist.ProcessGroup, own: dist.ProcessGroup, counters: Counters) -> None:
        super().__init__(way, group, counters)
        self._payloads = own

    def _payload_tag(self, _place: int) -> int:
        return 0


class OrderedReceiver(Receiver):
    """The other end: its receives are posted in the order of the puts, in whichever order slots are released."""

    def __init__(
        self, way: Way, ring_N: Tensor, group: dist.ProcessGroup, own: dist.ProcessGroup, counters: Counters
    ) -> None:
        super().__init__(way, ring_N, group, counters)
        self._payloads = own
        self._free: set[int] = set()
        self._next = 0

    def start(self) -> None:
        """Begin a step."""
        self._free.clear()
        self._next = 0
        super().start()

    def _payload_tag(self, _place: int) -> int:
        return 0

    def _post_after(self, place: int) -> None:
        self._free.add(place)
        while self._next in self._free:
            super()._post_after(self._next)
            self._next += 1
