"""Seconds to publish weights to two workers on this machine: shared memory, Ray's object store, collective broadcast.

From the call of ``send`` until both workers have verified every byte and read every tensor once into memory of their
own, as an engine does that loads them. ``copy`` is the floor: the same tensors cloned in one process. The transports
take turns, so that what else the machine does meets all of them. Shapes are those of the policy named, the numbers
random.

    python benchmarks/weight_transport.py [--mib 4,270,1024] [--runs 5] [--workers 2] [--json FILE]
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch

from paceline.rl.cluster.transport import Receiver, make_sender
from paceline.rl.fleet import Weights

KINDS = ("shared_memory", "object", "broadcast")


def smollm2(mib):
    """bfloat16 tensors of SmolLM2-135M's shapes, tied embeddings once, with as many layers as make about ``mib``."""
    hidden, ffn, keys, vocabulary = 576, 1536, 192, 49152
    layer = {
        "q_proj": (hidden, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, hidden),
        "gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn), "norm": (hidden,),
        "norm2": (hidden,),
    }  # fmt: skip
    layer_bytes = sum(2 * torch.Size(shape).numel() for shape in layer.values())
    embed_bytes = 2 * hidden * vocabulary
    total = mib << 20
    tensors = {}
    if total > embed_bytes:
        tensors["embed"] = torch.randn(vocabulary, hidden, dtype=torch.bfloat16)
        tensors["head"] = tensors["embed"]
        total -= embed_bytes
    for at in range(max(1, total // layer_bytes)):
        tensors |= {f"layers.{at}.{name}": torch.randn(shape, dtype=torch.bfloat16) for name, shape in layer.items()}
    return tensors


class Worker:
    def __init__(self, threads):
        torch.set_num_threads(threads)
        self.receiver = Receiver(300)
        self.mine = {}

    def load(self, parcel):
        start = time.perf_counter()
        weights = self.receiver.receive(parcel)
        received = time.perf_counter()
        if self.mine.keys() != weights.policy.keys():
            self.mine = {name: tensor.clone() for name, tensor in weights.policy.items()}
        for name, tensor in weights.policy.items():
            self.mine[name].copy_(tensor)
        return received - start

    def forget(self):
        self.mine = {}


def measured(sender, workers, weights):
    import ray

    start = time.perf_counter()
    parcel = sender.send(weights)
    sent = time.perf_counter()
    received = ray.get([worker.load.remote(parcel) for worker in workers])
    end = time.perf_counter()
    sender.release(weights.version)
    return {"total_s": end - start, "send_s": sent - start, "receive_s": max(received)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", default="4,270,1024")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    import ray

    threads = max(1, (os.cpu_count() or 1) // args.workers)
    torch.set_num_threads(threads)
    sizes = [int(size) for size in args.mib.split(",")]
    store = max(512 << 20, 3 * max(sizes) << 20)
    ray.init(
        address="local", num_cpus=args.workers, include_dashboard=False, log_to_driver=False, object_store_memory=store
    )
    workers = [ray.remote(num_cpus=0)(Worker).remote(threads) for _ in range(args.workers)]
    rows = []
    print(f"{os.cpu_count()} CPUs, {args.workers} workers of {threads} threads, torch {torch.__version__}, ", end="")
    print(f"ray {ray.__version__}, {platform.system()} {platform.release()}; medians of {args.runs} runs (range)\n")
    print("| weights | tensors | transport | publish, s | of it send, s | receive, s | against shared memory |")
    print("|---|---|---|---|---|---|---|")
    try:
        for mib in sizes:
            tensors = smollm2(mib)
            real_mib = sum(t.nbytes for t in {id(t): t for t in tensors.values()}.values()) / (1 << 20)
            senders = {kind: make_sender(kind, timeout_s=300) for kind in KINDS}
            found = {kind: [] for kind in KINDS}
            copies = []
            for run in range(args.runs + 1):  # the first is a warm-up
                start = time.perf_counter()
                clones = [tensor.clone() for tensor in {id(t): t for t in tensors.values()}.values()]
                copies.append(time.perf_counter() - start)
                del clones
                for kind, sender in senders.items():
                    found[kind].append(measured(sender, workers, Weights(run, tensors)))
            floor = statistics.median(copies[1:])
            medians = {}
            for kind in KINDS:
                runs = found[kind][1:]
                med = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                medians[kind] = med["total_s"]
                spread = min(run["total_s"] for run in runs), max(run["total_s"] for run in runs)
                # Paired by run: the machine is noisy, the turns are close together.
                ratio = statistics.median(
                    run["total_s"] / shared["total_s"]
                    for run, shared in zip(runs, found["shared_memory"][1:], strict=True)
                )
                rows.append({"mib": real_mib, "tensors": len(tensors), "transport": kind, **med, "range_s": spread,
                             "against_shared_memory": ratio, "events": senders[kind].events})  # fmt: skip
                cells = [f"{real_mib:.0f} MiB", str(len(tensors)), kind]
                cells += [f"{med['total_s']:.3f} ({spread[0]:.3f}-{spread[1]:.3f})"]
                cells += [f"{med['send_s']:.3f}", f"{med['receive_s']:.3f}", f"{ratio:.2f}x"]
                print(f"| {' | '.join(cells)} |", flush=True)
            rows.append({"mib": real_mib, "transport": "copy", "total_s": floor})
            print(f"| {real_mib:.0f} MiB | {len(tensors)} | copy in one process | {floor:.3f} | | | |", flush=True)
            for sender in senders.values():
                sender.close()
            ray.get([worker.forget.remote() for worker in workers])
    finally:
        ray.shutdown()
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
