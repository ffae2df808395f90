"""Two-level Gumbel-max sampling against the flat one: what a pass pays, and how well a drafter's samples couple.

Flat: one Gumbel draw for every vocabulary entry of every verified position. Two-level: one for every block and one for
every entry of the block that won. Both are exact and keyed by position. ``coupled`` is the share of positions at which
the policy and a drafter with its logits perturbed by normal noise sample the same token from the same noise.

    python benchmarks/keyed_sampling.py [--vocabulary 49152] [--json FILE]
"""

import argparse
import json
import time
from statistics import median

import torch

from paceline.sampling.keyed import block_logsumexp, keyed_sample
from paceline.sampling.noise import Purpose, gumbels


def two_level(logits_NV, seeds_N, positions_N):
    return keyed_sample(logits_NV, block_logsumexp(logits_NV), 1, seeds_N, positions_N)[0]


def flat(logits_NV, seeds_N, positions_N):
    (noise_NV,) = gumbels(1, seeds_N, positions_N, {Purpose.TOKEN: logits_NV.shape[1]})
    return (logits_NV.double() + noise_NV).argmax(-1)


def seconds(sample, logits_NV, repeats=5):
    seeds_N = torch.arange(len(logits_NV))
    times = []
    for number in range(repeats + 1):
        began = time.perf_counter()
        sample(logits_NV, seeds_N, torch.full_like(seeds_N, number))
        times.append(time.perf_counter() - began)
    return median(times[1:])


def coupled(sample, vocabulary, noise, positions=2000):
    generator = torch.Generator().manual_seed(0)
    equal = 0
    for start in range(0, positions, 100):
        logits_NV = 3 * torch.randn(100, vocabulary, generator=generator)
        drafter_NV = logits_NV + noise * torch.randn(100, vocabulary, generator=generator)
        seeds_N = torch.arange(start, start + 100)
        zeros_N = torch.zeros_like(seeds_N)
        equal += int((sample(logits_NV, seeds_N, zeros_N) == sample(drafter_NV, seeds_N, zeros_N)).sum())
    return equal / positions


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    for positions in (1, 8, 32, 136):
        logits_NV = torch.randn(positions, args.vocabulary)
        ours, theirs = seconds(two_level, logits_NV), seconds(flat, logits_NV)
        rows.append(
            {"positions": positions, "two_level_ms": 1e3 * ours, "flat_ms": 1e3 * theirs, "ratio": theirs / ours}
        )
        print(f"{positions:4d} positions  two-level {1e3 * ours:7.2f} ms  flat {1e3 * theirs:8.1f} ms", flush=True)
    for noise in (0.3, 1.0):
        ours, theirs = (coupled(sample, 4096, noise) for sample in (two_level, flat))
        rows.append({"drafter_noise": noise, "two_level_coupled": ours, "flat_coupled": theirs})
        print(f"drafter off by N(0, {noise})  coupled: two-level {ours:.3f}  flat {theirs:.3f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
