"""Published times of speculation in RL and serving as data: what each source gives beside them, what is assumed."""

from typing import Any

import msgspec

from paceline.simulate.steptime import Mode

_NEMO = "arXiv 2604.26779, Qwen3-8B, 32 GB200, vLLM, EAGLE-3, seconds a step read second-hand"
_NEMO_BIG = "arXiv 2604.26779, simulated there: Qwen3-235B-A22B, FP8, rollout batch 4096"
_SKYRL = "SkyRL docs, examples/spec_decode: Qwen3.5-9B, its MTP head, 8 x H100, DAPO, 32 prompts x 8"
_MARIN = "marin-community/marin#9114: Snowball 67B-A2B, one-layer EAGLE-3, GH200, 16 streams"
_BENCH = "specdecode-bench.github.io and arXiv 2601.11580, H100"
_VIME = "vime, tokens/GPU/s: 168.2 plain, 252.9 with a fresh drafter, 124.0 with a stale one"
_MILES = "Miles, MiMo-7B, tokens/s: 1219 plain, 1464 with a frozen drafter, 1667 with one trained online"

_PLAIN = {
    "think": {"data": 0.3, "refit": 2.1, "generation": 133.6, "logprob": 17.9, "train": 31.4},
    "zero": {"data": 0.2, "refit": 1.9, "generation": 100.0, "logprob": 17.8, "train": 31.3},
}
_THINK_DRAFTED = {"data": 0.2, "refit": 1.6, "generation": 87.0, "logprob": 18.1, "train": 30.5}
#: Draft length -> published speedup of generation.
SWEEPS = {"think": {3: 1.53, 5: 0.84, 7: 0.71}, "zero": {3: 1.77, 5: 1.44, 7: 1.21}}
_GENERATION = {"think": 1.54, "zero": 1.77}
_STEP = {"think": 1.35, "zero": 1.41}

_H100_STANDS_IN = "passes cost what those of Llama-3.1-8B on an H100 in vLLM do (SpecDecode-Bench)"
_BY_SIZES = "passes cost what those of Llama-3.1-8B on an H100 in vLLM do, by the sizes of the policy and its head"
#: Of an H100's bandwidth, and of its matrix products at the shares of their peaks that are reached (66 and 56 %).
_GB200 = {"memory": 8 / 3.35, "compute": 2.5 * 0.56 / (0.989 * 0.66)}
_ON_GB200 = "GB200 is an H100 by its bandwidth and matrix products; one GPU an engine"
_FULL = "all rows run all the time: no tail, no shrinking batch"
_ENGINES = "512 GPUs in engines of 4, so 32 rows an engine: the engines are those of NeMo-RL's recipe for the model"
_THEIR_SIMULATOR = "speedups of their simulator are taken as if measured"
#: Where a source is silent; the same for every cell.
_ROWS, _CONTEXT = 32, 4096
_SILENT_ROWS = f"{_ROWS} rows an engine: not published"
_SILENT_CONTEXT = f"{_CONTEXT} cached tokens a row: not published"
_SILENT = (_H100_STANDS_IN, _SILENT_ROWS, _SILENT_CONTEXT, _FULL)
_SILENT_NEMO = (_BY_SIZES, _ON_GB200, _SILENT_ROWS, _SILENT_CONTEXT, _FULL)
_NO_ACCEPTANCE = "not predicted: the acceptance is not published"
#: GH200 with 96 GB: 4 TB/s; its matrix products are an H100's.
_SNOWBALL: dict[str, Any] = {"tokens": 2.545, "rows": 16, "drafted": 3, "context": _CONTEXT} | {
    "policy": "snowball-67b-a2b",
    "memory": 4 / 3.35,
    "gpus": 4,
}
_SNOWBALL_ASSUMED = (
    _BY_SIZES,
    "a node is 4 GH200 of 96 GB that share every weight: the 134 GB fit on no one of them; that is not published",
    "tokens go to experts evenly, those of one request as well",
    "drafts of 3 tokens",
    _SILENT_CONTEXT,
    _FULL,
)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A published figure: a speedup, or what ``name`` says.

    ``law`` names the function that predicts it from ``given``; without one nothing that was published beside it tells,
    and ``assumed`` says what is missing.
    """

    name: str
    source: str
    published: float
    mode: Mode = "measured"
    law: str | None = None
    given: dict[str, Any] = {}
    assumed: tuple[str, ...] = ()


def _nemo(run: str) -> list[Cell]:
    """The cells of one run of the 8B policy."""
    ngram_tokens, ngram_speedup = {"think": (2.47, 0.5), "zero": (2.05, 0.7)}[run]
    engine: dict[str, Any] = {"rows": _ROWS, "context": _CONTEXT, "policy": "qwen3-8b"} | _GB200
    return [
        Cell(
            name=f"nemo-8b-{run}/step",
            source=_NEMO,
            published=_STEP[run],
            law="step_of_generation",
            given={"plain": _PLAIN[run], "speedup": _GENERATION[run]},
            assumed=("the other phases stay as in the plain run",),
        ),
        Cell(name=f"nemo-8b-{run}/generation-k3", source=_NEMO, published=SWEEPS[run][3], assumed=(_NO_ACCEPTANCE,)),
        *(
            Cell(
                name=f"nemo-8b-{run}/generation-k{drafted}",
                source=_NEMO,
                published=SWEEPS[run][drafted],
                law="h100_longer",
                given={"speedup": SWEEPS[run][3], "known": 3, "drafted": drafted} | engine,
                assumed=(*_SILENT_NEMO, "one acceptance rate at all depths, from the speedup at k = 3"),
            )
            for drafted in (5, 7)
        ),
        Cell(
            name=f"nemo-8b-{run}/generation-ngram",
            source=_NEMO,
            published=ngram_speedup,
            law="h100_speedup",
            given={"tokens": ngram_tokens, "drafted": 3, "ngram": True} | engine,
            assumed=(*_SILENT_NEMO, "drafts of 3 tokens", "which tokens per forward belong to which run"),
        ),
    ]


def _big(name: str, published: float, drafted: int, tokens: float, **sibling: float) -> Cell:
    """A cell of the 235B policy that a roofline of one engine is to predict."""
    engine: dict[str, Any] = {"tokens": tokens, "drafted": drafted, "rows": 4096 * 4 // 512, "context": _CONTEXT}
    return Cell(
        name=f"nemo-235b/{name}",
        source=_NEMO_BIG,
        published=published,
        mode="analytic",
        law="analytic_step" if sibling else "analytic_rollout",
        given=engine | sibling,
        assumed=(_ENGINES, _SILENT_CONTEXT, _FULL, "hardware, precision and drafter are those of the step times given")
        + (("generation's share from the other draft length's pair",) if sibling else ()),
    )


CELLS: tuple[Cell, ...] = (
    *_nemo("think"),
    *_nemo("zero"),
    Cell(name="nemo-8b-zero/generation-adapted", source=_NEMO, published=1.78, assumed=(_NO_ACCEPTANCE,)),
    Cell(name="nemo-8b-zero/generation-generic", source=_NEMO, published=1.51, assumed=(_NO_ACCEPTANCE,)),
    Cell(name="nemo-8b-zero/generation-generic-adapted", source=_NEMO, published=1.63, assumed=(_NO_ACCEPTANCE,)),
    Cell(
        name="nemo-8b/step-asynchronous",
        source=_NEMO,
        published=1.24,
        law="asynchronous_split",
        given={"plain": _PLAIN["think"], "drafted": _THINK_DRAFTED},
        assumed=(
            "the run is RL-Think: not published",
            "GPUs are split so that both pools are busy, anew for each run: the split is not published",
            "phases take the inverse of their pool's share",
        ),
    ),
    _big("rollout-k3", 2.72, 3, 3.0),
    _big("step-k3", 1.70, 3, 3.0, sibling_rollout=4.07, sibling_step=1.96),
    _big("rollout-k7", 4.07, 7, 5.0),
    _big("step-k7", 1.96, 7, 5.0, sibling_rollout=2.72, sibling_step=1.70),
    Cell(
        name="nemo-235b/rollout-asynchronous",
        source=_NEMO_BIG,
        published=3.5,
        mode="analytic",
        law="analytic_rollout",
        given={"tokens": 4.0, "drafted": 5, "rows": 8, "context": 4096},
        assumed=(
            "5 drafted tokens and 4 a forward, read second-hand",
            "4096 rollouts at once on 512 engines of 4 GPUs: 8 requests each",
            _SILENT_CONTEXT,
            _FULL,
            "hardware, precision and drafter are those of the step times given",
        ),
    ),
    Cell(
        name="nemo-235b/rollout-k3-from-k7",
        source=_NEMO_BIG,
        published=2.72,
        law="rollout_of_sibling",
        given={"tokens": 3.0, "drafted": 3, "sibling": [5.0, 7, 4.07]},
        assumed=(
            _THEIR_SIMULATOR,
            "a pass costs one plain decode and a part for each drafted token, the part from k = 7",
        ),
    ),
    Cell(
        name="nemo-235b/rollout-k7-from-k3",
        source=_NEMO_BIG,
        published=4.07,
        law="rollout_of_sibling",
        given={"tokens": 5.0, "drafted": 7, "sibling": [3.0, 3, 2.72]},
        assumed=(
            _THEIR_SIMULATOR,
            "a pass costs one plain decode and a part for each drafted token, the part from k = 3",
        ),
    ),
    Cell(
        name="nemo-235b/step-k3-from-rollout",
        source=_NEMO_BIG,
        published=1.70,
        law="step_of_sibling",
        given={"rollout": 2.72, "sibling_rollout": 4.07, "sibling_step": 1.96},
        assumed=(_THEIR_SIMULATOR, "generation's share from the pair at k = 7"),
    ),
    Cell(
        name="nemo-235b/step-k7-from-rollout",
        source=_NEMO_BIG,
        published=1.96,
        law="step_of_sibling",
        given={"rollout": 4.07, "sibling_rollout": 2.72, "sibling_step": 1.70},
        assumed=(_THEIR_SIMULATOR, "generation's share from the pair at k = 3"),
    ),
    Cell(
        name="nemo-235b/step-asynchronous-from-rollout",
        source=_NEMO_BIG,
        published=2.5,
        law="step_of_sibling",
        given={"rollout": 3.5, "sibling_rollout": 4.07, "sibling_step": 1.96},
        assumed=(
            _THEIR_SIMULATOR,
            "generation's share of the synchronous step at k = 7: that of the asynchronous one is not published",
        ),
    ),
    Cell(
        name="skyrl/rollout",
        source=_SKYRL,
        published=310.1 / 152.4,
        law="h100_speedup_by_depth",
        given={"cumulative": [0.886, 0.770, 0.663], "rows": 32, "context": _CONTEXT, "policy": "qwen3.5-9b"},
        assumed=(
            _BY_SIZES,
            "the policy's widths give the 9.0B parameters and 18 GB that the run's script says",
            "states of linear attention are written once a drafted token",
            "passes are captured in graphs (the run's script has enforce_eager, for all runs)",
            "half of the 8192 tokens that may be generated are cached a row",
            _FULL,
            "the rollout is all decoding",
        ),
    ),
    Cell(
        name="skyrl/step-from-acceptance",
        source=_SKYRL,
        published=400.7 / 246.8,
        law="h100_step",
        given={
            "plain": {"generation": 310.1, "train": 57.3, "other": 33.3},
            "drafter": 4.0,
            "cumulative": [0.886, 0.770, 0.663],
            "rows": 32,
            "context": _CONTEXT,
            "policy": "qwen3.5-9b",
        },
        assumed=("as for the rollout", "training the MTP head adds 4.0 s, as published", "the rest stays"),
    ),
    Cell(
        name="skyrl/step-from-rollout",
        source=_SKYRL,
        published=400.7 / 246.8,
        law="step_of_generation",
        given={
            "plain": {"generation": 310.1, "train": 57.3, "other": 33.3},
            "speedup": 310.1 / 152.4,
            "drafter": 4.0,
        },
        assumed=("training the MTP head adds 4.0 s, as published", "what is not rollout or training stays"),
    ),
    Cell(name="vime/fresh", source=_VIME, published=252.9 / 168.2, assumed=(_NO_ACCEPTANCE,)),
    Cell(
        name="vime/stale",
        source=_VIME,
        published=124.0 / 168.2,
        law="h100_speedup",
        given={"tokens": 1.0, "rows": _ROWS, "drafted": 3, "context": _CONTEXT},
        assumed=(*_SILENT, "drafts of 3 tokens by an EAGLE head", "a stale drafter keeps nothing"),
    ),
    Cell(name="miles/frozen", source=_MILES, published=1464 / 1219, assumed=(_NO_ACCEPTANCE,)),
    Cell(name="miles/online", source=_MILES, published=1667 / 1219, assumed=(_NO_ACCEPTANCE,)),
    Cell(
        name="marin/stream-after-36-steps",
        source=_MARIN,
        published=1.61,
        law="held_speed",
        given={"tokens_a_second": 160.0, "tokens": 2.545, "tokens_now": 2.545, "plain_tokens_a_second": 96.0},
        assumed=(
            "a pass at step 36 takes what it took at step 0, where a stream had 160 tokens/s",
            "2.545 tokens per forward at both, the middle of the published 2.53 to 2.56",
        ),
    ),
    Cell(
        name="marin/stream-h100-law",
        source=_MARIN,
        published=1.61,
        law="h100_speedup",
        given=_SNOWBALL,
        assumed=_SNOWBALL_ASSUMED,
    ),
    Cell(
        name="marin/stream-from-plain",
        source=_MARIN,
        published=1.61,
        law="h100_speedup",
        given=_SNOWBALL | {"plain_seconds": 1 / 96.0},
        assumed=(
            *_SNOWBALL_ASSUMED,
            "a plain pass took what 96 tokens/s a stream say; the law is of what drafts add",
        ),
    ),
    Cell(
        name="marin/step",
        source=f"{_MARIN}; shares from marin-community/marin#9079",
        published=1.42,
        law="rollouts_ahead",
        given={"step_seconds": 740.0, "trainer_waits": 0.7, "decode_share": 0.8, "decode_speedup": 1.61},
        assumed=(
            "rollouts run ahead and take the whole step, of which the trainer waits 70 %",
            "the 20 % of a trajectory that is not decoding stays",
        ),
    ),
    Cell(name="marin/ngram-k3", source=_MARIN, published=0.992, assumed=(_NO_ACCEPTANCE,)),
    Cell(name="marin/ngram-k5", source=_MARIN, published=1.005, assumed=(_NO_ACCEPTANCE,)),
    Cell(
        name="specdecode-bench/qwen3-8b-gsm8k-chain",
        source=f"{_BENCH}: EAGLE, k = 3, batch 1, SGLang, 2.25 tokens per forward",
        published=1.65,
        law="h100_speedup",
        given={"tokens": 2.25, "rows": 1, "drafted": 3, "context": 250, "policy": "qwen3-8b"},
        assumed=(_BY_SIZES, "a chain in SGLang costs what it does in vLLM", "250 cached tokens"),
    ),
    Cell(
        name="specdecode-bench/qwen3-8b-gsm8k-tree",
        source=f"{_BENCH}: EAGLE, depth 3, 21 nodes, batch 1, SGLang, 2.92 tokens per forward",
        published=1.85,
        law="h100_speedup",
        given={"tokens": 2.92, "rows": 1, "drafted": 3, "context": 250, "nodes": 21, "policy": "qwen3-8b"},
        assumed=(
            _BY_SIZES,
            "a node costs what it does in runs of Llama-3.1-8B in SGLang (sgl-project/sglang#4247), if those had 64",
            "250 cached tokens",
            "drafting a tree costs what drafting a chain of its depth does",
        ),
    ),
    Cell(
        name="specdecode-bench/llama-3.1-8b-gsm8k-batch-128",
        source=f"{_BENCH}: k = 3, vLLM",
        published=1.21,
        law="h100_speedup_of_kept",
        given={"kept": [147, 98, 78, 132], "rows": 128, "context": 250},
        assumed=(
            "kept tokens of EAGLE in the first five requests of the authors' combined_gsm8k.jsonl (455 drafts)",
            "the method is EAGLE",
            "250 cached tokens a row",
            _FULL,
        ),
    ),
)
