"""The worker's side: weights out of a parcel, verified."""

from typing import TYPE_CHECKING

from paceline.rl.cluster.transport import objects, shared_memory
from paceline.rl.cluster.transport.parcel import Manifest, Parcel, TransportError, decode, unpack
from paceline.rl.fleet import Weights

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.rl.cluster.transport.broadcast import Listener


class Receiver:
    """Takes the parcels of any sender. One thread at a time, which need not be the one that decodes.

    ``timeout_s`` is how long parts may be under way.
    """

    def __init__(self, timeout_s: float = 60.0):
        self.timeout_s = timeout_s
        self._listener: tuple[str, Listener] | None = None

    def receive(self, parcel: Parcel) -> Weights:
        """The weights of a parcel. TransportError, one line: have the sender's ``again`` sent instead.

        The tensors are views of shared memory or of Ray's store and may be read-only; they keep it alive, so an engine
        copies them and lets go. No version need be released before they are.
        """
        manifest = decode(parcel.message)
        try:
            if manifest.kind == "shared_memory":
                parts = shared_memory.get(manifest)
            elif manifest.kind == "object":
                parts = objects.get(manifest, parcel, self.timeout_s)
            else:
                parts = self._listened(manifest)
            return unpack(manifest, parts)
        except (RuntimeError, OSError, MemoryError) as error:
            reason = " ".join(str(error).split())[:200]
            raise TransportError(f"weights of version {manifest.version}: {reason}") from None

    def close(self) -> None:
        """Leave the broadcasts."""
        self._listener = None

    def _listened(self, manifest: Manifest) -> "list[Tensor]":
        from paceline.rl.cluster.transport.broadcast import Listener, is_place

        if not is_place(manifest.where):
            raise TransportError(f"weights of version {manifest.version}: {manifest.where[:40]!r} is no address")
        if self._listener is None or self._listener[0] != manifest.where:
            self._listener = manifest.where, Listener(manifest.where, self.timeout_s)
        return self._listener[1].get(manifest)
