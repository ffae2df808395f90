"""The Triton kernels of acceptance on a GPU: checked against the torch code, then timed beside it.

Without a GPU it says so and runs nothing. First the checks of ``tests/sampling/kernel_checks.py``, then tokens against
the CPU's, then times. A pass has N positions of random logits over V tokens. ``sample`` is what plain decoding pays
(block sums and the keyed pick). ``rejection`` and ``block`` add the laws of chains of four drafted tokens, each drawn
from a law of its own, and the samples of their residuals. The torch code reads bfloat16 as a float32 copy. Times are
medians of CUDA events; ``GB/s`` counts the bytes that must be read once at least, per second of the kernels, and stands
beside a copy's on the same GPU.

    python benchmarks/kernels.py [--json FILE]
"""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from paceline.sampling import kernels
from paceline.sampling.keyed import block_logsumexp, keyed_sample
from paceline.sampling.soft import SoftNodes, block_laws, rejection_laws

ROOT = Path(__file__).resolve().parents[1]
CHAIN = 4
SIZES = (8, 64, 512, 2048)
VOCABULARIES = (32_000, 152_064)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def sample(logits_NV, seeds_N, positions_N):
    logits_NV = read(logits_NV)
    blocks_NG = block_logsumexp(logits_NV)
    return blocks_NG, *keyed_sample(logits_NV, blocks_NG, 1, seeds_N, positions_N)


def rejection(logits_NV, seeds_N, positions_N, soft):
    blocks_NG, token_N, _ = sample(logits_NV, seeds_N, positions_N)
    if kernels.serve(logits_NV):
        from paceline.sampling.kernels import launch

        laws = launch.rejection_laws(logits_NV, blocks_NG, soft)
    else:
        laws = rejection_laws(read(logits_NV), soft)
    return residual_samples(laws, token_N, seeds_N, positions_N)


def block(logits_NV, seeds_N, positions_N, soft):
    chain_M, depth_M = np.divmod(np.arange(len(soft.node_M)), CHAIN)
    blocks_NG, token_N, _ = sample(logits_NV, seeds_N, positions_N)
    if kernels.serve(logits_NV):
        from paceline.sampling.kernels import launch

        laws = launch.block_laws(logits_NV, blocks_NG, soft, chain_M, depth_M + 1)
    else:
        laws = block_laws(read(logits_NV), soft, chain_M, depth_M + 1)
    return residual_samples(laws, token_N, seeds_N, positions_N)


def residual_samples(laws, token_N, seeds_N, positions_N):
    at_P = laws.parent_P
    found_P, margin_P = laws.sample(1, seeds_N[at_P], positions_N[at_P])
    token_N[at_P] = found_P
    return laws.log_accept_M, token_N, margin_P


def read(logits_NV):
    """What the torch code is given: at least float32, as ``processors.process`` leaves it."""
    if kernels.serve(logits_NV):
        return logits_NV
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))


def keys(count, on):
    return torch.arange(count, device=on) * 7919 + 13, torch.arange(count, device=on) % 1000


def drafted(logits_NV, dtype):
    """Chains of ``CHAIN`` nodes under every fifth position, each drawn from the policy's law at temperature 1.25."""
    chains = len(logits_NV) // (CHAIN + 1)
    parent_M = (np.arange(chains)[:, None] * (CHAIN + 1) + np.arange(CHAIN)[None, :]).ravel()
    laws_LV = torch.empty((len(parent_M), logits_NV.shape[1]), dtype=dtype, device=logits_NV.device)
    tokens = []
    for start in range(0, len(parent_M), 256):
        at = torch.from_numpy(parent_M[start : start + 256]).to(logits_NV.device)
        laws_LV[start : start + 256] = (logits_NV[at].float() / 1.25).to(dtype)
        law_LV = laws_LV[start : start + 256]
        tokens.append(keyed_sample(law_LV.float(), block_logsumexp(law_LV.float()), 2, *keys(len(at), at.device))[0])
    law_M, rank_M = np.arange(len(parent_M)), np.zeros(len(parent_M), dtype=np.int64)
    return SoftNodes(parent_M + 1, parent_M, torch.cat(tokens).cpu().numpy(), law_M, rank_M, laws_LV)


class By:
    """Within, the kernels serve, or the torch code does."""

    def __init__(self, fused):
        self.switch = "1" if fused else "0"

    def __enter__(self):
        os.environ["PACELINE_KERNELS"] = self.switch

    def __exit__(self, *_):
        del os.environ["PACELINE_KERNELS"]


def milliseconds(run, fused, most_seconds=0.4):
    """Median of CUDA events after a warm-up, over as many runs as fit, 5 to 30."""
    with By(fused):
        run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        repeats = int(min(30, max(5, most_seconds / (time.perf_counter() - began))))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in events:
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in events)
    return median(times), times[0], times[-1]


def copied_bytes_per_second():
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    took, _, _ = milliseconds(lambda: target.copy_(source), fused=False)
    return 2 * source.numel() * 4 / took * 1e3


def agreement(found, wanted, sure=1e-4):
    """Share of equal tokens where the margin exceeds what float32 block sums can differ by."""
    is_sure_N = wanted[2].cpu() > sure
    return float((found[1].cpu() == wanted[1].cpu())[is_sure_N].double().mean())


def against_the_cpu():
    """Tokens of the kernels, of torch on the GPU and of torch on the CPU, on the same logits."""
    rows = []
    for vocabulary in VOCABULARIES:
        for name, dtype in (("float64", torch.float64), *DTYPES.items()):
            logits_NV = (3 * torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(1))).to(dtype)
            on_gpu = logits_NV.cuda()
            wanted = sample(logits_NV, *keys(64, "cpu"))
            shares = []
            for fused in (True, False):
                with By(fused):
                    shares.append(agreement(sample(on_gpu, *keys(64, "cuda")), wanted))
            rows.append({"vocabulary": vocabulary, "dtype": name, "kernels": shares[0], "torch_on_gpu": shares[1]})
            print(f"tokens as on the CPU  V {vocabulary:6d}  {name:8s}  kernels {shares[0]:.4f}  torch {shares[1]:.4f}")
    return rows


def timed(bandwidth):
    rows = []
    print(f"\n{'what':10s} {'N':>5s} {'V':>7s} {'dtype':9s} {'torch ms':>9s} {'kernels':>9s} {'ratio':>6s}"
          f" {'GB/s':>6s} {'of copy':>7s}  same")  # fmt: skip
    for vocabulary in VOCABULARIES:
        for name, dtype in DTYPES.items():
            for n in SIZES:
                logits_NV = (3 * torch.randn(n, vocabulary, device="cuda")).to(dtype)
                seeds_N, positions_N = keys(n, "cuda")
                soft = drafted(logits_NV, dtype)
                for what in (sample, rejection, block):
                    drafts = () if what is sample else (soft,)
                    rows.append(one(what, (logits_NV, seeds_N, positions_N, *drafts), name, bandwidth))
                del logits_NV, soft
                torch.cuda.empty_cache()
    return rows


def one(what, args, dtype, bandwidth):
    logits_NV = args[0]
    found = []
    for fused in (True, False):
        with By(fused):
            result = what(*args)
            found.append([tensor.cpu() for tensor in result])
            del result
    ours, fastest, slowest = milliseconds(lambda: what(*args), fused=True)
    theirs, _, _ = milliseconds(lambda: what(*args), fused=False)
    # All rows are read for their block sums; for residuals the laws twice, and the rows they belong to once more.
    size = logits_NV.numel() * logits_NV.element_size()
    if what is not sample:
        size += 3 * args[3].laws_LV.numel() * args[3].laws_LV.element_size()
    row = {
        "what": what.__name__, "positions": len(logits_NV), "vocabulary": logits_NV.shape[1], "dtype": dtype,
        "torch_ms": theirs, "kernels_ms": ours, "kernels_ms_range": [fastest, slowest],
        "bytes_per_second": size / ours * 1e3, "share_of_copy": size / ours * 1e3 / bandwidth,
        "same_tokens": float((found[0][1] == found[1][1]).double().mean()),
    }  # fmt: skip
    if what is not sample:
        worst = (found[0][0].exp() - found[1][0].exp()).abs().max()
        row["acceptance_differs_by"] = float(worst)
    print(f"{row['what']:10s} {row['positions']:5d} {row['vocabulary']:7d} {dtype:9s} {theirs:9.3f} {ours:9.3f} "
          f"{theirs / ours:6.1f} {row['bytes_per_second'] / 1e9:6.0f} {row['share_of_copy']:7.0%}  "
          f"{row['same_tokens']:.4f} {row.get('acceptance_differs_by', 0):.0e}", flush=True)  # fmt: skip
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure (the kernels are tested in Triton's interpreter)")
        return
    import triton

    began = time.perf_counter()
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    print(json.dumps(machine))
    sys.path.insert(0, str(ROOT / "tests" / "sampling"))
    from kernel_checks import run_checks

    failures = run_checks(torch.device("cuda"))
    for name, failure in failures.items():
        print(f"{'FAILED' if failure else 'passed'}  {name}\n{failure}".rstrip(), flush=True)
    print(f"checks took {time.perf_counter() - began:.0f} s, compiling included", flush=True)
    tokens = against_the_cpu()
    bandwidth = copied_bytes_per_second()
    print(f"a copy moves {bandwidth / 1e9:.0f} GB/s, read and written")
    found = {"machine": machine, "failures": failures, "tokens": tokens, "copy_bytes_per_second": bandwidth}
    found["times"] = timed(bandwidth)
    print(f"all took {time.perf_counter() - began:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    if any(failures.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
