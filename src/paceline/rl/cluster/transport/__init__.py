"""How weights reach the workers: shared memory on one host, Ray's object store, or a collective broadcast.

``make_sender`` stands beside the learner, a ``Receiver`` in each worker; between them travels a ``Parcel``. What comes
out of a parcel is verified (checksums, bounds, dtypes) or refused by TransportError; nothing is ever unpickled.
"""

from paceline.rl.cluster.transport.parcel import Parcel, TransportError
from paceline.rl.cluster.transport.receiver import Receiver
from paceline.rl.cluster.transport.sender import Sender, choose, make_sender

__all__ = ["Parcel", "Receiver", "Sender", "TransportError", "choose", "make_sender"]
