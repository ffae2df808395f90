"""Weights through Ray: to actors of this machine by every transport, and by the object store where another fails."""

import resource
import signal
import subprocess
import sys
import time

import pytest
import torch

from paceline.rl.cluster.transport import Receiver, TransportError, make_sender
from paceline.rl.fleet import Weights

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class Reader:
    """An actor that says what it received."""

    def __init__(self):
        self.receiver = Receiver(20)

    def read(self, parcel):
        """Version, and the bytes of every tensor."""
        weights = self.receiver.receive(parcel)
        tensors = {**weights.policy, **(weights.drafter or {})}
        return weights.version, {
            name: (str(t.dtype), tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, t in tensors.items()
        }


@pytest.fixture(scope="module")
def readers(cluster):
    made = [ray.remote(num_cpus=0)(Reader).remote() for _ in range(2)]
    yield made
    for actor in made:
        ray.kill(actor)


def _sample(version):
    generator = torch.Generator().manual_seed(version)
    matrix = torch.randn(300, 40, generator=generator, dtype=torch.float64)
    policy = {
        "embed": matrix, "tied": matrix, "half": torch.randn(33, generator=generator).bfloat16(),
        "scalar": torch.tensor(version), "empty": torch.empty(0, 2), "columns": matrix.T, "\u2603": torch.ones(1),
    }  # fmt: skip
    return Weights(version, policy, {"head": torch.randn(7, generator=generator)}, version)


def _said(weights):
    tensors = {**weights.policy, **weights.drafter}
    return weights.version, {
        name: (str(t.dtype), tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("kind", ["shared_memory", "object", "broadcast"])
def test_actors_receive_bit_for_bit_what_was_published(readers, kind):
    sender = make_sender(kind)
    for version in range(3):
        weights = _sample(version)
        parcel = sender.send(weights)
        assert ray.get([actor.read.remote(parcel) for actor in readers], timeout=60) == [_said(weights)] * 2
    assert ray.get(readers[0].read.remote(sender.again(1)), timeout=60) == _said(_sample(1))
    sender.close()


def test_objects_are_read_in_place_and_freed_when_released(cluster):
    sender, receiver = make_sender("object"), Receiver()
    tensor = torch.randn(1 << 20)
    parcel = sender.send(Weights(0, {"w": tensor}))
    first, second = receiver.receive(parcel), receiver.receive(parcel)
    assert first.policy["w"].data_ptr() == second.policy["w"].data_ptr() != tensor.data_ptr()
    sender.release(0)
    del parcel
    assert torch.equal(first.policy["w"], tensor)
    with pytest.raises(KeyError):
        sender.again(0)


def test_a_damaged_object_is_one_line(cluster):
    sender = make_sender("object")
    parcel = sender.send(_sample(5))
    damaged = ray.get(parcel.parts[0]).copy()
    damaged[100] ^= 1
    for parts, says in [
        ((ray.put(damaged),), "part 0 fails its checksum"),
        ((ray.put(damaged[:-1].copy()),), "not of the size"),
        ((ray.put("bytes"),), "no bytes"),
        ((), "not in the object store"),
        (("no reference",), "Ray has them no more"),
    ]:
        with pytest.raises(TransportError, match=rf"\Aweights of version 5: [^\n]*{says}[^\n]*\Z"):
            Receiver().receive(parcel._replace(parts=parts))


def test_where_memory_is_short_weights_go_through_the_object_store_and_that_is_counted(cluster):
    sender = make_sender("shared_memory")
    weights = _sample(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        parcel = sender.send(weights)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sender.events == {"shared_memory_full": 1}
    assert torch.equal(Receiver().receive(parcel).policy["embed"], weights.policy["embed"])
    assert sender.again(1) == parcel
    sender.close()


_LOST = """
import os, sys
from paceline.rl.cluster.transport import Parcel, Receiver, broadcast
join = broadcast._Groups.join
when, number = sys.argv[1], int(sys.argv[2])
def lost(*args):
    if when == "joined":
        group = join(*args)
    os.kill(os.getpid(), number)
broadcast._Groups.join = lost
print("ready", flush=True)
Receiver(30).receive(Parcel(bytes.fromhex(sys.stdin.readline())))
"""


def test_a_worker_lost_in_a_broadcast_holds_up_nobody_and_its_version_comes_by_object(cluster, monkeypatch):
    monkeypatch.setattr("paceline.rl.cluster.transport.broadcast._GATHER_SECONDS", 0.5)  # so that they share a group
    broadcast = make_sender("broadcast", timeout_s=2)
    cases = [("asked", signal.SIGKILL), ("joined", signal.SIGKILL), ("joined", signal.SIGSTOP)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _LOST, when, str(int(number))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for when, number in cases
    ]  # fmt: skip
    survivor = Receiver(10)
    try:
        for version, process in enumerate(processes):
            assert process.stdout.readline() == "ready\n"
            weights = Weights(version, {"w": torch.randn(4 << 20)})  # more than sockets hold
            parcel = broadcast.send(weights)
            process.stdin.write(parcel.message.hex() + "\n")
            process.stdin.flush()
            try:
                received = survivor.receive(parcel)
            except TransportError as error:
                assert "\n" not in str(error)  # noqa: PT017 - gloo may have served it before the loss
                received = survivor.receive(broadcast.again(version))
            assert torch.equal(received.policy["w"], weights.policy["w"])
            while broadcast.events.get("broadcast_fell_back", 0) <= version:
                time.sleep(0.01)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        broadcast.close()
    assert broadcast.events["broadcast_fell_back"] == 3
