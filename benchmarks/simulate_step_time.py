"""Tables of reckoned step times: a mixture's passes by batch, and NVIDIA's projections beside ours.

python benchmarks/simulate_step_time.py
"""

import math

from paceline.simulate.breakdown import Layout
from paceline.simulate.cost import PRESETS
from paceline.simulate.hardware import load_hardware
from paceline.simulate.nvidia import EagleTime, policy
from paceline.simulate.published import analytic_rollout, validate
from paceline.simulate.roofline import Roofline
from paceline.sizes.shapes import load_shape

CONTEXT = 4096


def mixture() -> None:
    """A Qwen3-235B-A22B engine of 4 GB200 in FP8 by batch: plain passes, and what verifying 3 drafted tokens adds."""
    time = policy(Layout(tensor=4))
    print(f"{time.source}; {CONTEXT} cached tokens a request")
    print("batch  ms a pass  experts read  bound by  ms with 3 drafted  ratio")
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        plain = time.breakdown(batch, batch, batch * CONTEXT)
        drafted = time.seconds(batch, 4 * batch, batch * CONTEXT)
        experts = next(part for part in plain.parts if part.name == "experts")
        print(
            f"{batch:5}  {1e3 * plain.seconds:9.2f}  {plain.experts_touched:12.1%}  {experts.bound:8}  "
            f"{1e3 * drafted:17.2f}  {drafted / plain.seconds:5.2f}"
        )
    print(f"memory holds {time.most_rows(CONTEXT)} requests of {CONTEXT} tokens\n")


def dense() -> None:
    """Llama-3.1-8B on an H100 in BF16, beside the formula that SpecDecode-Bench measured."""
    time = Roofline(load_shape("llama-3.1-8b"), load_hardware("h100"))
    measured = PRESETS["llama-3.1-8b-h100"][1]
    print(f"{time.source}; arXiv 2601.11580's formula beside it; 1000 cached tokens a request")
    print("batch  tokens  ms reckoned  ms measured  relative error")
    for batch, a_row in ((1, 1), (1, 4), (8, 1), (8, 4), (32, 1), (32, 4), (64, 1), (64, 4), (128, 1), (128, 4)):
        ours, theirs = (t.seconds(batch, batch * a_row, batch * 1000) for t in (time, measured))
        print(f"{batch:5}  {batch * a_row:6}  {1e3 * ours:11.2f}  {1e3 * theirs:11.2f}  {ours / theirs - 1:+14.1%}")
    print()


#: GPUs, drafted tokens, tokens a forward: the synchronous cells, and what is said of the asynchronous one.
_CELLS = ((512, 3, 3.0), (512, 7, 5.0), (2048, 5, 4.0))


def nvidia() -> None:
    """NVIDIA's projections of the 235B policy, then what other assumptions than ours would have given."""
    for cell in validate(steptime=policy(Layout(tensor=4)), draft=EagleTime(Layout(tensor=4))):
        if cell.mode == "analytic":
            print(
                f"{cell.name}: published {cell.published}, predicted {cell.predicted:.2f}, {cell.relative_error:+.1%}"
            )
            print(f"    assumed: {'; '.join(cell.assumed)}")
    print("\nother assumptions: rollout speedups of the three cells")
    for layout, context, in_flight in (
        (Layout(tensor=4), 1024, 1),
        (Layout(tensor=4), 4096, 1),
        (Layout(tensor=4), 4096, 3),
        (Layout(tensor=4), 16384, 1),
        (Layout(tensor=2), 4096, 1),
        (Layout(tensor=8), 4096, 1),
        (Layout(tensor=4, expert=8, data=2), 4096, 1),
        (Layout(tensor=4, expert=64, data=16), 4096, 1),
    ):
        speedups = []
        for gpus, drafted, tokens in _CELLS:
            # The asynchronous run may have several batches of 4096 rollouts in flight.
            rollouts = 4096 * (in_flight if gpus > 512 else 1)
            rows = math.ceil(rollouts * layout.gpus / gpus)
            found = analytic_rollout(policy(layout), EagleTime(layout), tokens, drafted, rows, context)
            speedups.append(f"{found:.2f}")
        axes = f"tensor {layout.tensor}, expert {layout.expert}, data {layout.data}, context {context}"
        print(f"{axes}, batches in flight {in_flight}".ljust(64), "  ".join(speedups))


if __name__ == "__main__":
    mixture()
    dense()
    nvidia()
