"""The worker's side: weights out of a parcel, verified."""

from paceline.rl.cluster.transport import objects, shared_memory
from paceline.rl.cluster.transport.parcel import Parcel, TransportError, decode, unpack
from paceline.rl.fleet import Weights


class Receiver:
    """Takes the parcels of any sender. One thread at a time, which need not be the one that decodes.

    ``timeout_s`` is how long parts may be under way.
    """

    def __init__(self, timeout_s: float = 60.0):
        self.timeout_s = timeout_s

    def receive(self, parcel: Parcel) -> Weights:
        """The weights of a parcel. TransportError, one line: have the sender's ``again`` sent instead.

        The tensors are views of shared memory or of Ray's store and may be read-only; they keep it alive, so an engine
        copies them and lets go. No version need be released before they are.
        """
        manifest = decode(parcel.message)
        try:
            if manifest.kind == "shared_memory":
                parts = shared_memory.get(manifest)
            else:
                parts = objects.get(manifest, parcel, self.timeout_s)
            return unpack(manifest, parts)
        except (RuntimeError, MemoryError) as error:
            reason = " ".join(str(error).split())[:200]
            raise TransportError(f"weights of version {manifest.version}: {reason}") from None

    def close(self) -> None:
        """Leave the groups it has joined."""
