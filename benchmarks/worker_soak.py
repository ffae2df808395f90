"""Ten thousand requests through two workers: memory of every process over time, and how long the queues were.

The text-to-SQL policy answers 32 prompts over and over, groups of 8, with history drafts; new weights are published
every few hundred requests, as training would. Memory is what the kernel calls resident, minus what is shared memory.
After the warm-up (the first 40% of the requests) a straight line is fitted to each process' memory; the error of its
slope is that over ten blocks of time.

    OMP_NUM_THREADS=1 python benchmarks/worker_soak.py [--requests 10000] [--json FILE] [KEY=VALUE ...]
"""

import argparse
import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from paceline.config import load_config
from paceline.rl.cluster.ray_fleet import RayFleet
from paceline.rl.curriculum import load_items, rollout_requests
from paceline.rl.fleet import Order, Weights
from paceline.rl.policy import Policy
from paceline.rl.tasks.registry import make_task

WARM_UP = 0.4
SETTINGS = (
    "cluster.kind=ray", "cluster.history_mib=4", "sampling.max_tokens=48", "engine.slots=16", "rl.max_age_steps=1",
    "drafter.history.window=8", "drafter.history.elsewhere_tokens=65536", "budget.mode=fixed", "drafter.budget=8",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """What a look showed: seconds since the start, rollouts so far, MiB by process, requests that wait or are held."""

    seconds: float
    rollouts: int
    mib: dict[str, float]
    outstanding: int
    held: dict[str, int]


@dataclass(frozen=True)
class Soak:
    """All looks, how often each request came back, and the bounds that queues must keep."""

    samples: list[Sample]
    answers: np.ndarray
    most_outstanding: int
    most_held: int
    events: dict[str, int]
    history_bytes: int
    seconds: float


def resident_mib(pid):
    """Resident memory of a process without shared memory."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    kib = {name: int(value) for name, value in re.findall(r"^(RssAnon|RssFile):\s+(\d+) kB", status, re.MULTILINE)}
    return sum(kib.values()) / 1024


def worker_pids(fleet):
    """Process ids of the workers, by seat."""
    hands = {seat: member.hand for seat, member in fleet._members.items()}
    ray = fleet._crew._ray
    return {seat: ray.get(hand._actor.ping.remote()) for seat, hand in hands.items()}


def soak(config, requests, publish_every=400, look_seconds=1.0):
    """Send ``requests`` through the workers of ``config`` as a run would, and look at them every so often."""
    policy = Policy.load(config.policy, config.seed)
    tasks = {name: make_task(name, task, config.seed) for name, task in config.tasks.items()}
    items = load_items(tasks, "train", policy.encode_prompt)
    size, version, visit, submitted, published = config.rl.group_size, 0, 0, 0, 0
    most = (config.rl.max_age_steps + 1) * config.rl.prompts_per_step * size
    # Made before the first look, so that keeping the score takes no memory of its own.
    answers, done, number_of = np.zeros(requests, np.uint8), 0, {}
    samples, started, looked = [], time.monotonic(), 0.0
    fleet = RayFleet(config, has_grammars=False)
    try:
        fleet.begin(Weights(0, policy.refit_tensors()))
        pids = {}
        while done < requests:
            while submitted < requests and submitted - done + size <= most:
                item, visit = items[visit % len(items)], visit + 1
                group = rollout_requests([item], size, config.sampling, config.seed, f"soak-{visit}")
                fleet.submit([Order(step=version, group=group[0].group, version=version, requests=group)])
                number_of |= {request.request_id: submitted + index for index, request in enumerate(group)}
                submitted += size
            for rollout in fleet.collect(0.2):
                answers[number_of.pop(rollout.request_id)] += 1  # KeyError: it was answered before
                done += 1
            if done - published >= publish_every:
                version, published = version + 1, done
                fleet.publish(Weights(version, policy.refit_tensors()))
            if time.monotonic() - looked >= look_seconds and fleet.workers_up == config.cluster.rollout_workers:
                looked = time.monotonic()
                fleet.spans()  # as a run does after every step
                pids = pids or {"driver": os.getpid()} | worker_pids(fleet)
                samples.append(_look(fleet, pids, done, looked - started))
        history = fleet._desk.ask(lambda: fleet._history.nbytes) if fleet._history else 0
        return Soak(samples, answers, most, config.engine.slots + config.cluster.ahead, fleet.stats().events, history,
                    time.monotonic() - started)  # fmt: skip
    finally:
        fleet.close()


def _look(fleet, pids, rollouts, seconds):
    dispatcher, members = fleet._dispatcher, fleet._members
    outstanding, held = fleet._desk.ask(
        lambda: (dispatcher.outstanding, {seat: len(dispatcher.held(one.number)) for seat, one in members.items()})
    )
    return Sample(seconds, rollouts, {name: resident_mib(pid) for name, pid in pids.items()}, outstanding, held)


def slope(rollouts, mib, blocks=10):
    """MiB for a thousand rollouts after the warm-up, and its standard error, of a line through block means."""
    x, y = (
        np.array([part.mean() for part in np.array_split(np.asarray(values), blocks)]) for values in (rollouts, mib)
    )
    line, residuals, *_ = np.polyfit(x, y, 1, full=True)
    error = np.sqrt((residuals[0] if residuals.size else 0.0) / (blocks - 2) / ((x - x.mean()) ** 2).sum())
    return 1000 * float(line[0]), 1000 * float(error)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/async.yaml")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    config = load_config(args.config, [*SETTINGS, *args.overrides])
    found = soak(config, args.requests)
    assert (found.answers == 1).all(), "a request was not answered, or twice"
    warm = [sample for sample in found.samples if sample.rollouts >= WARM_UP * args.requests]
    print(f"{found.answers.size} requests, each answered once, in {found.seconds:.0f} s; "
          f"{len(found.samples)} looks; events {found.events}")  # fmt: skip
    print("| process | after warm-up | at the end | most | slope, MiB a thousand requests |")
    print("|---|---|---|---|---|")
    slopes = {}
    for name in warm[0].mib:
        mib = [sample.mib[name] for sample in warm]
        slopes[name] = slope([sample.rollouts for sample in warm], mib)
        print(f"| {name} | {mib[0]:.1f} MiB | {mib[-1]:.1f} MiB | {max(mib):.1f} MiB "
              f"| {slopes[name][0]:+.2f} ± {slopes[name][1]:.2f} |")  # fmt: skip
    outstanding = max(sample.outstanding for sample in found.samples)
    held = max(max(sample.held.values()) for sample in found.samples)
    print(f"requests that wait or are decoded: at most {outstanding} (bound {found.most_outstanding}); held by one "
          f"worker: at most {held} (bound {found.most_held}); history kept: {found.history_bytes / 2**20:.2f} MiB "
          f"(bound {config.cluster.history_mib})")  # fmt: skip
    if args.json:
        body = {"samples": [asdict(sample) for sample in found.samples], "slopes": slopes, "seconds": found.seconds}
        args.json.write_text(json.dumps(body, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
