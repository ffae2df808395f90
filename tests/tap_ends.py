"""Two processes at the ends of a tap's way, by every transport, and what each of them saw."""

import gc
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from paceline.cotrain.parallel import shared
from paceline.cotrain.parallel.links import Counters, TapError, Way
from paceline.cotrain.parallel.slots import order_of
from paceline.cotrain.parallel.ways import TapWays

CPU = torch.device("cpu")
#: Puts, slots, shape and dtype of one step after the other: larger, smaller, and with more slots than puts.
STEPS = [
    (5, 2, (2, 1, 3, 4), torch.float32),
    (4, 3, (3, 2, 700, 4), torch.bfloat16),
    (4, 3, (3, 2, 700, 4), torch.bfloat16),
    (3, 3, (1, 1, 5, 2), torch.float64),
    (2, 6, (1, 2, 2000, 4), torch.float32),
]
SOURCES = (0, 2)
UNORDERED = (6, 3, (1, 1, 2, 2), torch.float32)
#: Those of ``nccl`` are on groups of gloo here, without tags.
TRANSPORTS = ("gloo", "shared_memory", "nccl")


def way(source, puts, slots, shape, dtype):
    return Way(source, 0, 1, puts, slots, shape, dtype)


def payload(step, source, place, shape, dtype):
    """States that are those of no other put."""
    draw = torch.Generator().manual_seed(1000 * step + 100 * source + place)
    return torch.randn(shape, generator=draw).to(dtype)


def begin(rank, root, world=2):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=world)


def made(transport, pipelines=((0, 1),), seconds=60):
    order = order_of("Interleaved1F1B", 2, 4, 4)
    return TapWays.make(pipelines, order, CPU, transport, timedelta(seconds=seconds), backend="gloo")


def files():
    """Files in shared memory that this process maps or holds open, by name."""
    gc.collect()
    maps = [
        line.split(maxsplit=5)[5].strip() for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line
    ]
    held = [os.readlink(opened) for opened in Path("/proc/self/fd").iterdir() if opened.is_symlink()]
    return [
        [name for name in names if name.startswith(("/dev/shm", f"/memfd:{shared.NAME}"))] for names in (maps, held)
    ]


def lies_in(tensor):
    """The name of the file that holds a tensor, or none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(address, 16) for address in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < end:
            return line.split(maxsplit=5)[5].strip() if "/memfd" in line else ""
    raise ValueError("a tensor that lies nowhere")


def steps(ways, is_drafter):
    """Every step of ``STEPS`` on the same ways, the drafter far behind; what it took, and where its slots lay."""
    taken, kinds = {}, set()
    for number, (puts, slots, shape, dtype) in enumerate(STEPS):
        given = {source: way(source, puts, slots, shape, dtype) for source in SOURCES}
        ways.prepare(given)
        counters = {source: Counters() for source in SOURCES}
        if is_drafter:
            ends = {source: ways.inlet(each, counters[source]) for source, each in given.items()}
        else:
            ends = {source: ways.outlet(each, counters[source]) for source, each in given.items()}
        for end in ends.values():
            end.start()
        for place in range(puts):
            for source, end in ends.items():
                if is_drafter:
                    time.sleep(0.005)
                    slot = end.take(place)
                    kinds.add(lies_in(slot))
                    taken[f"{number}.{source}.{place}"] = slot.clone()
                    end.release(place)
                else:
                    end.put(place, payload(number, source, place, shape, dtype))
        for end in ends.values():
            end.finish()
    return taken, sorted(kinds)


def play_steps(root, rank, transport):
    """Rank 0 puts and rank 1 takes; the files of each while the ways are open, and when they are closed."""
    ways = made(transport)
    taken, kinds = steps(ways, rank == 1)
    save_file(taken, root / f"steps-{transport}-{rank}.safetensors")
    seen = {"transport": ways.transport, "kinds": kinds, "open": files()}
    dist.barrier()
    ways.close()
    seen["closed"] = files()
    (root / f"seen-{transport}-{rank}.json").write_text(json.dumps(seen))


def play_unordered(root, rank, transport):
    """Slots are freed in another order than that in which they were filled."""
    end, given, ways = ends_of(made(transport), rank == 1, *UNORDERED)
    taken = {}
    if rank == 0:
        put_all(end, given)
    else:
        for first in (0, 3):
            for place in (first + 1, first, first + 2):
                taken[f"0.0.{place}"] = end.take(place).clone()
                end.release(place)
    end.finish()
    ways.close()
    save_file(taken, root / f"unordered-{transport}-{rank}.safetensors")


def play_hung(root, rank, transport):
    """Rank 1 takes once and does no more: what rank 0 says."""
    end, given, ways = ends_of(made(transport, seconds=3), rank == 1, 4, 2, (1, 1, 2, 2), torch.float32)
    told = root / f"hung-{transport}.txt"
    if rank == 0:
        told.write_text(lost(end, given, ways))
    else:
        end.take(0)
    # Longer than rank 0 waits.
    dist.barrier()


def play_apart(root, rank):
    """Ranks that do not reach each other's memory, as on two hosts: what ``auto`` comes to, and the refusal."""
    reached = shared.found

    def found(where, size_bytes):
        if rank == 1 and where[0] != os.getpid():
            raise FileNotFoundError(where)
        return reached(where, size_bytes)

    shared.found = found
    said = made("auto").transport
    try:
        made("shared_memory")
    except TapError as error:
        said += "\n" + str(error)
    shared.found = reached
    (root / f"apart-{rank}.txt").write_text(said)


def play_short(root, rank):
    """No memory is left when the rings are made: what each rank says."""
    ways = made("shared_memory")

    def fallocate(*_):
        raise OSError("no memory is left")

    allocate, os.posix_fallocate = os.posix_fallocate, fallocate
    try:
        ways.prepare({0: way(0, 2, 1, (1, 1, 512, 1024), torch.float32)})
    except TapError as error:
        (root / f"short-{rank}.txt").write_text(str(error))
    os.posix_fallocate = allocate


def rank_main(rank, root):
    """One of two ranks plays everything that both survive, and leaves what it saw under ``root``."""
    begin(rank, root)
    for transport in ("auto", *TRANSPORTS):
        play_steps(root, rank, transport)
        play_unordered(root, rank, transport)
    play_apart(root, rank)
    play_short(root, rank)
    for transport in TRANSPORTS:
        play_hung(root, rank, transport)


def rank_of_five_main(rank, root):
    """Two pipelines of two ranks and one rank of none; then ranks 1, 2 and 3 are killed amid a step with rank 0."""
    begin(rank, root, world=5)
    for transport in TRANSPORTS:
        ways = made(transport, ((0, 1), (2, 3)))
        assert (ways is None) == (rank == 4)
        if ways is not None:
            save_file(steps(ways, rank % 2 == 1)[0], root / f"pipelines-{transport}-{rank}.safetensors")
            ways.close()
    all_ways = {transport: made(transport, ((0, victim),)) for victim, transport in enumerate(TRANSPORTS, 1)}
    for victim, transport in enumerate(TRANSPORTS, 1):
        if rank not in (0, victim):
            continue
        end, given, ways = ends_of(all_ways.pop(transport), rank == victim, 4, 2, (1, 1, 2, 2), torch.float32)
        (root / f"files-{transport}-{rank}.json").write_text(json.dumps(files()))
        if rank == victim:
            end.take(0)
            os.kill(os.getpid(), signal.SIGKILL)
        (root / f"killed-{transport}.txt").write_text(lost(end, given, ways))
        del end, ways
        (root / f"files-{transport}-after.json").write_text(json.dumps(files()))
    # The groups of the dead are not to be waited for.
    os._exit(0)


def ends_of(ways, is_drafter, *shape):
    """This rank's end of a way of ``shape`` from source 0, in a step that has begun, and the way and its ways."""
    given = way(0, *shape)
    ways.prepare({0: given})
    end = ways.inlet(given, Counters()) if is_drafter else ways.outlet(given, Counters())
    end.start()
    return end, given, ways


def put_all(end, given):
    for place in range(given.puts):
        end.put(place, payload(0, 0, place, given.shape, given.dtype))


def lost(end, given, ways):
    """What the source says whose other end is lost, once: closing is quiet."""
    said = "nothing"
    try:
        put_all(end, given)
    except TapError as error:
        said = str(error)
    end.finish()
    ways.close()
    return said
