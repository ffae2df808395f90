r"""What context parallelism costs and saves a drafter's training: memory, traffic, balance, a rank at 256k tokens.

- head: one step of an EAGLE-3 head (training-time test of three passes, float32) on packed unequal documents,
  by processes over gloo: the ring, all keys gathered, and all keys gathered under a dense mask. Live bytes are
  those of tensors above the loaded head, its gradients and optimiser, in the fullest rank; resident ones the kernel's
  figure. Losses and gradients must be those of one process. Then what each rank sent beside the closed forms.
- balance: contiguous slices against zigzag, by pairs and by the time of each rank's kernels, one rank at a time.
- far: one rank of 64 of a document of 256k tokens, the others played by a generator (simulated).

    OMP_NUM_THREADS=1 python benchmarks/context_parallel.py [--parts head balance far] [--worlds 1 2 4] \
      [--json FILE] [--figure FILE]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from context_ranks import balance, far, head

MIB = 2**20
PARTS = ("head", "balance", "far")
NAMES = {
    "one process": "one process",
    "ring": "ring",
    "gather": "keys gathered",
    "mask": "keys gathered, dense mask",
}
CLOSE = 1e-5


def table(names, rows):
    """Markdown, printed."""
    print(f"\n| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    print(flush=True)


def of_head(sizes, worlds):
    """Measured and printed: a head's step by every way and number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        rows = head.measure(sizes, worlds, folder)
    whole = {row["way"]: row["live_bytes"] for row in rows if row["ranks"] == worlds[0]}
    print(
        f"## A step of an EAGLE-3 head\n\n{sum(sizes.lengths)} tokens in documents of "
        f"{', '.join(map(str, sizes.lengths))}; hidden {sizes.hidden}, {sizes.heads} query and {sizes.key_heads} key "
        f"heads of {sizes.head_size}, vocabulary {sizes.vocabulary}, {sizes.passes} passes, float32. Beside what the "
        f"table shows each rank holds {rows[0]['held_bytes'] / MIB:.1f} MiB of weights, gradients and moments, however "
        "many there are. MiB a rank:"
    )
    names = "way,ranks,inputs,live at most,of one rank,resident at most,processor s,loss off by,gradients off by"
    table(
        names.split(","),
        (
            (NAMES[row["way"]], row["ranks"], f"{row['input_bytes'] / MIB:.1f}", f"{row['live_bytes'] / MIB:.1f}",
             f"{row['live_bytes'] / whole[row['way']]:.3f}", f"{row['resident_bytes'] / MIB:.0f}",
             f"{row['process_seconds']:.1f}", f"{row['loss_difference']:.1e}", f"{row['gradient_difference']:.1e}")
            for row in rows
        ),
    )  # fmt: skip
    far_off = [row for row in rows if max(row["loss_difference"], row["gradient_difference"]) > CLOSE]
    assert not far_off, f"not the loss and gradients of one process: {far_off}"
    print("Sent by a rank in a step of the ring, messages / MiB (the fullest rank's):")
    sent = []
    for row in (row for row in rows if row["way"] == "ring"):
        forms = [head.to_send(sizes, row["ranks"], rank) for rank in range(row["ranks"])]
        assert row["sent"] == forms, f"sent {row['sent']}, by the closed form {forms}"
        cells = [max(form[kind] for form in forms) for kind in ("keys", "gradients", "rows")]
        sent.append((row["ranks"], *(f"{count} / {size / MIB:.3f}" for count, size in cells), "equal"))
    table(("ranks", "keys and values", "their gradients", "rows", "closed form, every rank"), sent)
    return rows


def of_balance(lengths, heads, size, repeats, worlds, timed):
    """Measured and printed: how evenly two orders deal the work."""
    print("## Contiguous slices and zigzag\n\nThe fullest rank over the mean:")
    rows = []
    for name, documents in (("packed", lengths), ("one document", (sum(lengths),))):
        for world in worlds:
            row = {"documents": name, "ranks": world}
            for order in ("contiguous", "zigzag"):
                row[f"{order}_pairs"] = balance.uneven(balance.pairs(documents, world, order))
                if world in timed:
                    takes = balance.seconds(documents, world, order, heads, size, repeats)
                    row |= {f"{order}_seconds": balance.uneven(takes), f"{order}_slowest": max(takes)}
            rows.append(row)
    names = (
        "documents,ranks,contiguous pairs,contiguous kernels,zigzag pairs,zigzag kernels,slowest s: contiguous / zigzag"
    )
    cell = lambda row, name: f"{row[name]:.3f}" if name in row else ""  # noqa: E731
    columns = ("contiguous_pairs", "contiguous_seconds", "zigzag_pairs", "zigzag_seconds")
    table(
        names.split(","),
        (
            (row["documents"], row["ranks"], *(cell(row, name) for name in columns),
             " / ".join(filter(None, (cell(row, "contiguous_slowest"), cell(row, "zigzag_slowest")))))
            for row in rows
        ),
    )  # fmt: skip
    return rows


def of_far(what, sampled):
    """Measured and printed: one rank of many, simulated."""
    found = far.run(what)
    off = far.errors(what, found, sampled)
    sent = found["sent"]
    row = {key: value for key, value in found.items() if isinstance(value, int | float)} | {"errors": off, "sent": sent}
    trunk = 2 * what.length * what.key_heads * what.size * 4
    print(
        f"## One rank of {what.world} at {what.length} tokens, simulated\n\nRank {what.rank}, {found['rows']} rows, "
        f"{what.heads} query and {what.key_heads} key heads of {what.size}, {what.own} keys of each row's own, "
        f"float32; keys of the other ranks come from a generator of random numbers. The trunk's keys and values are "
        f"{trunk / MIB:.0f} MiB."
    )
    names = "forward s,backward s,inputs MiB,added live MiB,added resident MiB"
    table(
        names.split(","),
        [
            (f"{found['forward_seconds']:.1f}", f"{found['backward_seconds']:.1f}",
             *(f"{found[name] / MIB:.1f}" for name in ("input_bytes", "live_bytes", "resident_bytes")))
        ],
    )  # fmt: skip
    print(f"Sent, messages / MiB: keys {sent['keys'][0]} / {sent['keys'][1] / MIB:.0f}, gradients "
          f"{sent['gradients'][0]} / {sent['gradients'][1] / MIB:.0f}.")  # fmt: skip
    print(f"Against float64 matrices, {sampled} rows, over the largest element:")
    table(("of", "off by"), ((name, f"{value:.1e}") for name, value in off.items()))
    assert max(off.values()) < CLOSE, f"not what matrices give: {off}"
    return row


def draw(rows, path):
    """Live bytes by the number of ranks."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(5.6, 3.4), layout="constrained")
        axes = figure.subplots()
        for way, marker in (("mask", "s"), ("gather", "^"), ("ring", "o")):
            own = [row for row in rows if row["way"] == way]
            axes.plot(
                [row["ranks"] for row in own],
                [row["live_bytes"] / MIB for row in own],
                marker,
                ls="-",
                label=NAMES[way],
            )
        ring = [row for row in rows if row["way"] == "ring"]
        axes.plot(
            [row["ranks"] for row in ring],
            [ring[0]["live_bytes"] / MIB / row["ranks"] for row in ring],
            color="0.5", ls=":", label="one rank's, divided",
        )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        ticks = [row["ranks"] for row in ring]
        axes.set_xticks(ticks, ticks)
        sizes = [256, 512, 1024, 2048, 4096]
        axes.set_yticks(sizes, sizes)
        axes.set_xlabel("ranks")
        axes.set_ylabel("MiB of live tensors a rank, at most")
        axes.legend()
        figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4], help="ranks of the head, from 1 on")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    if args.worlds[0] != 1:
        parser.error("--worlds: begin with 1, which the others are held against")
    torch.set_num_threads(1)
    sizes, found = head.Sizes(), {}
    if "head" in args.parts:
        found["head"] = of_head(sizes, args.worlds)
    if "balance" in args.parts:
        kernels = ((sizes.heads, sizes.key_heads), sizes.head_size, args.repeats)
        found["balance"] = of_balance(sizes.rows(), *kernels, (2, 4, 8, 64), (8,))
    if "far" in args.parts:
        found["far"] = of_far(far.Far(), 64)
    if args.figure and "head" in found:
        draw(found["head"], args.figure)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
