"""How weights travel: what arrives is what was sent, bit for bit, or one line says why it did not."""

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.rl.cluster.transport import Parcel, Receiver, TransportError, choose, make_sender
from paceline.rl.cluster.transport.parcel import DTYPES, PART_BYTES, Entry, decode, encode, fill, plan, stream
from paceline.rl.fleet import Weights

KINDS = ["shared_memory", "broadcast"]


@pytest.fixture(params=KINDS)
def sender(request):
    made = make_sender(request.param, timeout_s=5)
    yield made
    made.close()


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same(left, right):
    assert (left.version, left.drafter_version) == (right.version, right.drafter_version)
    assert (left.drafter is None) == (right.drafter is None)
    for ours, theirs in ((left.policy, right.policy), (left.drafter or {}, right.drafter or {})):
        assert list(ours) == list(theirs)
        for name, tensor in ours.items():
            assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
            assert bits(tensor) == bits(theirs[name]), name


def every_kind_of_tensor():
    """One of each dtype, without dimensions, empty, strided, broadcast, with NaN and negative zero, oddly named."""
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(5, 3, generator=generator).mul(9).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {
        "scalar": torch.tensor(-0.0, dtype=torch.float64),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "transposed": torch.randn(4, 6, generator=generator).T,
        "strided": torch.arange(40)[::3],
        "expanded": torch.tensor([1.5]).expand(7),
        "nan": torch.tensor([float("nan"), float("-inf")]),
        "парам.\u2603 \x00\n\U0001f6b4": torch.ones(2),
        "": torch.zeros(1),
        "trained": torch.nn.Parameter(torch.ones(3)),
    }
    return tensors


def test_every_dtype_and_shape_arrives_bit_for_bit(sender):
    weights = Weights(7, every_kind_of_tensor(), {"head": torch.randn(3, 2, dtype=torch.float64)}, 5)
    assert_same(Receiver(10).receive(sender.send(weights)), weights)


def test_a_policy_without_tensors_or_of_empty_ones_arrives(sender):
    for version, policy in enumerate([{}, {"empty": torch.empty(0)}]):
        weights = Weights(version, policy, {})
        assert_same(Receiver(10).receive(sender.send(weights)), weights)


def test_tied_tensors_travel_once_and_arrive_tied(sender):
    matrix = torch.randn(64, 64)
    parcel = sender.send(Weights(0, {"embed": matrix, "head": matrix, "transposed": matrix.T}, {"embed": matrix}))
    assert sum(decode(parcel.message).sizes) == 2 * matrix.nbytes  # the transposed one is another layout
    received = Receiver(10).receive(parcel)
    assert received.policy["embed"].data_ptr() == received.policy["head"].data_ptr()
    assert received.drafter["embed"].data_ptr() == received.policy["embed"].data_ptr()


def test_what_was_sent_stays_when_the_learner_goes_on(sender):
    tensor = torch.zeros(9)
    parcel = sender.send(Weights(0, {"w": tensor}))
    tensor += 1
    assert Receiver(10).receive(parcel).policy["w"].tolist() == [0.0] * 9


def test_several_versions_are_kept_until_each_is_released(sender):
    receiver = Receiver(10)
    parcels = [sender.send(Weights(version, {"w": torch.full((3,), version)})) for version in range(3)]
    early = receiver.receive(parcels[0])
    for version in (2, 1, 0):
        assert receiver.receive(parcels[version]).policy["w"].tolist() == [version] * 3
        sender.release(version)
        with pytest.raises(TransportError, match=f"weights of version {version}: "):
            receiver.receive(parcels[version])
    assert early.policy["w"].tolist() == [0, 0, 0]


def test_a_version_sent_twice_is_the_later_one(sender):
    sender.send(Weights(4, {"w": torch.zeros(2)}))
    parcel = sender.send(Weights(4, {"w": torch.ones(2)}))
    assert Receiver(10).receive(parcel).policy["w"].tolist() == [1, 1]


def test_an_engine_that_writes_to_its_tensors_changes_nobody_elses(sender):
    parcel = sender.send(Weights(0, {"w": torch.ones(3)}))
    Receiver(10).receive(parcel).policy["w"].zero_()
    assert Receiver(10).receive(parcel).policy["w"].tolist() == [1, 1, 1]


def test_weights_of_a_dtype_that_cannot_travel_are_named(sender):
    with pytest.raises(TransportError, match="odd: weights of dtype complex64 cannot travel"):
        sender.send(Weights(0, {"odd": torch.zeros(2, dtype=torch.complex64)}))
    with pytest.raises(TransportError, match="no Unicode text"):
        sender.send(Weights(0, {"\ud800": torch.zeros(2)}))


@given(
    sizes=st.lists(st.integers(0, 300), max_size=20),
    part_bytes=st.sampled_from([64, 128, 1000, PART_BYTES]),
)
@settings(deadline=None, max_examples=60)
def test_parts_are_bounded_and_hold_every_tensor_whole(sizes, part_bytes):
    policy = {str(at): torch.full((size,), at % 250 + 1, dtype=torch.uint8) for at, size in enumerate(sizes)}
    laid = plan(Weights(0, policy), part_bytes)
    largest = max(sizes, default=0)
    assert all(64 <= size <= max(part_bytes, largest + 63) for size in laid.sizes)
    for size, sources in zip(laid.sizes, laid.sources, strict=True):
        part_N = torch.full((size,), 255, dtype=torch.uint8)
        fill(part_N, sources)
        assert b"".join(stream(size, sources)) == part_N.numpy().tobytes()
    for entry in laid.policy:
        part_N = torch.empty(laid.sizes[entry.part], dtype=torch.uint8)
        fill(part_N, laid.sources[entry.part])
        assert part_N[entry.offset : entry.end].tolist() == policy[entry.name].tolist()


# Hostile and damaged parcels


@pytest.fixture(scope="module")
def parcel():
    sender = make_sender("shared_memory")
    yield sender.send(Weights(3, {"a": torch.randn(40), "b": torch.randn(3, 5).bfloat16()}, {"h": torch.ones(4)}, 2))
    sender.close()


@given(at=st.integers(0, 10**6), flip=st.integers(1, 255))
@settings(deadline=None)
def test_a_flipped_byte_of_the_manifest_is_one_line(parcel, at, flip):
    message = bytearray(parcel.message)
    message[at % len(message)] ^= flip
    with pytest.raises(TransportError, match=r"\A[^\n]*publish the weights again\Z"):
        Receiver().receive(Parcel(bytes(message)))


@given(cut=st.integers(0, 10**6))
@settings(deadline=None)
def test_a_manifest_cut_short_is_one_line(parcel, cut):
    with pytest.raises(TransportError, match=r"\A[^\n]+\Z"):
        Receiver().receive(Parcel(parcel.message[: cut % len(parcel.message)]))


_SIZES = st.one_of(st.integers(-2, 300), st.sampled_from([1 << 31, 1 << 47, 1 << 48, 1 << 63, (1 << 64) - 1]))
_ENTRIES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]), st.sampled_from([*DTYPES, "object", "bool"]),
        st.lists(_SIZES, max_size=4), _SIZES, _SIZES,
    ), max_size=3,
)  # fmt: skip


@given(
    policy=_ENTRIES, drafter=st.none() | _ENTRIES, sizes=st.none() | st.lists(_SIZES, max_size=3), kind=st.sampled_from(
        ["shared_memory", "object", "broadcast", "pickle"]
    ), where=st.none() | st.sampled_from(["", "1:0", "../../etc:0", "1:0/", f"127.0.0.1:1/{'0' * 32}", "x" * 999]),
)  # fmt: skip
@settings(deadline=None, max_examples=300)
def test_hostile_manifests_with_a_right_checksum_are_one_line_or_harmless(parcel, policy, drafter, sizes, kind, where):
    told = msgspec.to_builtins(decode(parcel.message))
    told |= {"policy": policy, "drafter": drafter, "kind": kind}
    told["sizes"] = told["sizes"] if sizes is None else sizes
    told["where"] = told["where"] if where is None else where
    told["digests"] = told["digests"] * len(told["sizes"])
    try:
        weights = Receiver(1).receive(Parcel(_sealed(told)))
    except TransportError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both ends are right
    else:
        inside = decode(parcel.message).sizes[0]
        assert all(tensor.nbytes <= inside for tensor in [*weights.policy.values(), *(weights.drafter or {}).values()])


def _sealed(told):
    import xxhash

    body = msgspec.msgpack.encode(told)
    return xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body


@given(body=st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_with_a_right_checksum_are_one_line(body):
    import xxhash

    with pytest.raises(TransportError, match=r"\A[^\n]+\Z"):
        decode(xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"policy": [Entry("a", "float32", (40,), 0, 64), Entry("a", "float32", (1,), 0, 0)]}, "named twice"),
        ({"policy": [Entry("a", "float32", (1 << 40,), 0, 0)]}, "out of bounds"),
        ({"policy": [Entry("a", "float32", (1 << 47,) * 16, 0, 0)]}, "out of bounds"),
        ({"policy": [Entry("a", "float32", (1,), 1, 0)]}, "out of bounds"),
        ({"policy": [Entry("a", "float32", (1,), 0, 4)]}, "out of bounds"),
        ({"policy": [Entry("a", "quint8", (1,), 0, 0)]}, "dtype 'quint8'"),
        ({"sizes": [1 << 40]}, "not of the sizes"),
        ({"digests": []}, "1 parts and 0 checksums"),
        ({"digests": [5]}, "part 0 fails its checksum"),
    ],
)
def test_a_manifest_that_contradicts_itself_says_how(parcel, change, says):
    wrong = msgspec.structs.replace(decode(parcel.message), **change)
    with pytest.raises(TransportError, match=f"weights of version 3: .*{says}.*; publish them again"):
        Receiver().receive(Parcel(encode(wrong)))


def test_only_sealed_files_of_weights_are_opened(tmp_path, parcel):
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * sum(decode(parcel.message).sizes))
    unsealed = os.memfd_create("paceline-weights", os.MFD_ALLOW_SEALING)
    os.write(unsealed, secret.read_bytes())
    reading, writing = os.pipe()
    with secret.open("rb") as opened:
        for handle, says in [
            (opened.fileno(), "no file of weights"),
            (unsealed, "was cut or is not finished"),
            (reading, "no file of weights"),
            (10**6, "No such file"),
        ]:
            told = msgspec.structs.replace(decode(parcel.message), where=f"{os.getpid()}:{handle}")
            with pytest.raises(TransportError, match=says):
                Receiver().receive(Parcel(encode(told)))
    for handle in (unsealed, reading, writing):
        os.close(handle)


def test_published_memory_can_be_neither_cut_nor_written(parcel):
    handle = int(decode(parcel.message).where.split(":")[1])
    with pytest.raises(PermissionError):
        os.ftruncate(handle, 1)
    with pytest.raises(PermissionError):
        os.pwrite(handle, b"x", 0)
    assert fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL


# Processes that end


def test_memory_of_a_killed_sender_is_free_and_nothing_is_left(tmp_path):
    code = (
        "import os, sys, time, torch\n"
        "from paceline.rl.cluster.transport import make_sender\n"
        "from paceline.rl.fleet import Weights\n"
        "sender = make_sender('shared_memory')\n"
        "parcel = sender.send(Weights(0, {'w': torch.ones(1000)}))\n"
        "sys.stdout.buffer.write(parcel.message); sys.stdout.flush(); os.close(1); time.sleep(600)\n"
    )
    before = set(_named_memory())
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        message = process.stdout.read()
        weights = Receiver().receive(Parcel(message))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert weights.policy["w"].sum() == 1000  # the map outlives whoever sent it
    with pytest.raises(TransportError, match="No such file"):
        Receiver().receive(Parcel(message))
    assert not list(tmp_path.iterdir())
    assert not [name for name in set(_named_memory()) - before if "paceline" in name]


def _named_memory():
    return os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []


def test_released_memory_is_given_back():
    sender, receiver = make_sender("shared_memory"), Receiver()
    handles = len(os.listdir("/proc/self/fd"))
    for version in range(20):
        receiver.receive(sender.send(Weights(version, {"w": torch.ones(1 << 16)})))
        sender.release(version)
    assert len(os.listdir("/proc/self/fd")) <= handles
    sender.close()


@pytest.fixture
def broadcast():
    made = make_sender("broadcast", timeout_s=3)
    yield made
    made.close()


def _together(receivers, *parcels):
    """What each receiver got or said, all told at the same time, of one parcel or each of its own."""
    outcomes = {}

    def receive(at):
        try:
            outcomes[at] = receivers[at].receive(parcels[at % len(parcels)])
        except TransportError as error:
            outcomes[at] = error

    threads = [threading.Thread(target=receive, args=(at,)) for at in range(len(receivers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[at] for at in range(len(receivers))]


def test_all_who_ask_together_share_a_broadcast_and_latecomers_get_their_own(broadcast):
    receivers = [Receiver(10) for _ in range(3)]
    for version in range(6):  # more than the groups that are kept
        weights = Weights(version, {"w": torch.randn(1000), "x": torch.tensor(version)}, {"h": torch.randn(3)}, version)
        parcel = broadcast.send(weights)
        early = receivers[: 1 + version % 3]
        for received in _together(early, parcel) + _together(receivers[len(early) :], parcel):
            assert_same(received, weights)
    assert broadcast.events == {}


def test_versions_may_be_asked_for_in_any_order_at_the_same_time(broadcast):
    parcels = [broadcast.send(Weights(version, {"w": torch.full((5,), version)})) for version in range(3)]
    receivers = [Receiver(10) for _ in parcels]
    for turn in range(3):
        order = parcels[turn:] + parcels[:turn]
        received = _together(receivers, *order)
        assert [weights.policy["w"].tolist() for weights in received] == [[(at + turn) % 3] * 5 for at in range(3)]


def test_a_receiver_ends_in_one_line_where_the_sender_is_gone(broadcast):
    parcel = broadcast.send(Weights(0, {"w": torch.ones(2)}))
    receiver = Receiver(1)
    receiver.receive(parcel)
    broadcast.close()
    with pytest.raises(TransportError, match=r"\Aweights of version 0: [^\n]+\Z"):
        receiver.receive(parcel)


def test_a_broadcast_from_an_address_of_another_machine_is_one_line():
    with pytest.raises(
        TransportError, match=r"\Acluster.transport=broadcast: 203.0.113.1 cannot be listened at: [^\n]+\Z"
    ):
        make_sender("broadcast", host="203.0.113.1")  # an address for documentation, RFC 5737


def test_a_broadcast_listens_at_its_address_alone(broadcast):
    receivers = [Receiver(10) for _ in range(2)]
    _together(receivers, broadcast.send(Weights(0, {"w": torch.ones(2)})))
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # LISTEN
                listening.add((fields[9], fields[1].rpartition(":")[0]))
    own = {os.readlink(f"/proc/self/fd/{handle}") for handle in _handles()}
    addresses = {address for inode, address in listening if f"socket:[{inode}]" in own}
    assert addresses == {"0100007F"}


def _handles():
    """Those of this process that are open while it is asked."""
    return [handle for handle in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{handle}")]


# Choice


def test_auto_takes_memory_on_one_host_and_objects_elsewhere():
    assert choose("auto", one_host=True) == "shared_memory"
    assert choose("auto", one_host=False) == "object"
    assert [choose(kind, one_host=False) for kind in ("shared_memory", "object", "broadcast")] == [
        "shared_memory", "object", "broadcast",
    ]  # fmt: skip
