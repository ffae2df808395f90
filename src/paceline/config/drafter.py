"""The sections about drafters and how much they draft."""

import math
from typing import Literal

import msgspec

from paceline.config.base import Section, require


class PromptLookupConfig(Section):
    """Prompt lookup: the text's end is found in the text itself, from ``max_match`` tokens down to ``min_match``.

    A match of m tokens drafts at most ``factor`` * m (0: no such limit).
    """

    min_match: int = 1
    max_match: int = 3
    factor: float = 0.0
    newest: bool = True

    def __post_init__(self) -> None:
        require(self.min_match >= 1, "min_match", self.min_match, ">= 1")
        require(self.max_match >= self.min_match, "max_match", self.max_match, ">= min_match")
        require(self.factor >= 0, "factor", self.factor, ">= 0 (0 is no limit)")


class HistoryConfig(Section):
    """The history drafter. ``window`` responses are kept a prompt, ``elsewhere_tokens`` tokens of all prompts together.

    ``cap_mib`` caps the memory of responses (0: no cap). ``floor`` is the least probability of a drafted node,
    ``matches`` how many places vote at most. ``threads`` work beside the engine's own (-1: spare cores, at most 3).
    ``prefetch`` is how many outcomes of a pass get a draft prepared while the policy verifies (0: none). ``warm`` is a
    snapshot to start from, or the folder of a run.
    """

    window: int = 64
    elsewhere_tokens: int = 1 << 20
    cap_mib: int = 4096
    siblings: bool = True
    floor: float = 0.002
    matches: int = 32
    threads: int = -1
    prefetch: int = 0
    warm: str | None = None

    def __post_init__(self) -> None:
        require(self.window >= 1, "window", self.window, ">= 1 rollout per prompt")
        require(self.elsewhere_tokens >= 0, "elsewhere_tokens", self.elsewhere_tokens, ">= 0 (0: own prompt only)")
        require(self.cap_mib >= 0, "cap_mib", self.cap_mib, ">= 0 (0 is no cap)")
        require(0 < self.floor < 1, "floor", self.floor, "between 0 and 1")
        require(1 <= self.matches <= 1024, "matches", self.matches, "in [1, 1024]")
        require(-1 <= self.threads <= 64, "threads", self.threads, "in [-1, 64] (-1: spare cores, at most 3)")
        require(0 <= self.prefetch <= 256, "prefetch", self.prefetch, "in [0, 256] (0 is off)")
        require(self.warm != "", "warm", self.warm, "a snapshot or the folder of a run, or null for none")


class HeadConfig(Section):
    """A head that drafts from the policy's hidden states, for the kinds ``eagle3``, ``mtp`` and ``block``.

    ``path`` is the directory or hub id of its weights. Where it is null an ``mtp`` head is the one that the policy's
    checkpoint brings along, if it does, and any other starts as ``init`` says: ``random``, or from the ``policy``'s own
    layers. ``taps`` are the layers whose outputs it reads, by 0-based number (empty: the kind's own choice),
    ``layers`` how many it has itself, ``vocabulary`` how many of the policy's tokens it can draft (0: all of them),
    ``block`` how many tokens a block head drafts in one pass, and ``width`` how many children a node of a draft has.
    """

    path: str | None = None
    init: Literal["random", "policy"] = "policy"
    taps: tuple[int, ...] = ()
    layers: int = 1
    vocabulary: int = 0
    block: int = 8
    width: int = 1
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        require(self.path != "", "path", self.path, "a directory or a hub id, or null for none")
        rising = all(a < b for a, b in zip(self.taps, self.taps[1:], strict=False))
        require(rising and all(tap >= 0 for tap in self.taps), "taps", self.taps, "rising numbers of layers, from 0")
        require(self.layers >= 1, "layers", self.layers, ">= 1")
        require(self.vocabulary >= 0, "vocabulary", self.vocabulary, ">= 0 (0 is the policy's)")
        require(2 <= self.block <= 64, "block", self.block, "in [2, 64]")
        require(1 <= self.width <= 64, "width", self.width, "in [1, 64] (1 drafts chains)")


class HybridConfig(Section):
    """History and a ``model`` that drafts, together: for each request what is worth most at the moment.

    With ``graft`` history goes on below what the model drafts, with ``extend`` the model goes on where history ends.
    """

    model: Literal["eagle3", "mtp", "block", "draft_model"] = "eagle3"
    graft: bool = True
    extend: bool = True


class DraftModelConfig(Section):
    """A small language model that drafts: its directory or hub id, and how many children a node of its backbone has."""

    path: str = ""
    width: int = 1
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        require(1 <= self.width <= 64, "width", self.width, "in [1, 64] (1 drafts chains)")


#: Kinds of drafter that are vLLM's own and run inside it only.
INSIDE_VLLM = ("ngram", "suffix")
#: Kinds that draft with a head of the policy's, and all kinds that draft with a model, which training can move.
HEADS = ("eagle3", "mtp", "block")
MODELS = (*HEADS, "draft_model")
#: Kinds that remember what was said.
HISTORIES = ("history", "hybrid")

Kind = Literal[
    "none",
    "prompt_lookup",
    "history",
    "draft_model",
    "forced",
    "ngram",
    "suffix",
    "eagle3",
    "mtp",
    "block",
    "hybrid",
]


class DrafterConfig(Section):
    """Who drafts. ``budget`` is the most tokens drafted for one request in one pass.

    With ``forced``, what a request's grammar forces is drafted too; ``kind`` "forced" drafts nothing else. ``ngram``
    and ``suffix`` are vLLM's own drafters; ``ngram`` takes its lengths from ``prompt_lookup``. ``eagle3``, ``mtp`` and
    ``block`` are heads, ``hybrid`` joins history and a model that drafts. With ``isolate`` the drafter works in a
    process of its own, so that its end costs drafts and nothing else.
    """

    kind: Kind = "history"
    budget: int = 16
    forced: bool = True
    isolate: bool = False
    history: HistoryConfig = msgspec.field(default_factory=HistoryConfig)
    prompt_lookup: PromptLookupConfig = msgspec.field(default_factory=PromptLookupConfig)
    draft_model: DraftModelConfig = msgspec.field(default_factory=DraftModelConfig)
    head: HeadConfig = msgspec.field(default_factory=HeadConfig)
    hybrid: HybridConfig = msgspec.field(default_factory=HybridConfig)

    @property
    def model_kind(self) -> str | None:
        """The kind of model that drafts, alone or beside history; None where none does."""
        kind = self.hybrid.model if self.kind == "hybrid" else self.kind
        return kind if kind in MODELS else None

    def __post_init__(self) -> None:
        is_named = self.model_kind != "draft_model" or bool(self.draft_model.path.strip())
        require(is_named, "draft_model.path", self.draft_model.path, "a model directory or a hub id")
        require(self.budget >= 0, "budget", self.budget, ">= 0")
        separable = not self.isolate or self.kind in ("none", "history", "prompt_lookup")
        require(
            separable, "isolate", self.isolate, f"false where kind is {self.kind}, which shares the engine's process"
        )
        require(self.forced or self.kind != "forced", "forced", self.forced, "true where kind is forced")


class BudgetConfig(Section):
    """How much of what is offered is verified.

    ``adaptive`` measures what passes cost and verifies what pays, down to nothing. Drafts then depend on the clock:
    tokens are the same on equal logits, but in float32 the shape of a pass moves the last bits of its logits, so near
    ties may fall differently from run to run. ``fixed`` verifies every offered node, and a run repeats bit for bit.
    """

    mode: Literal["adaptive", "fixed"] = "adaptive"
    margin: float = 0.03
    probe_share: float = 0.005
    stragglers: float = 0.5

    def __post_init__(self) -> None:
        require(0 <= self.margin < math.inf, "margin", self.margin, "finite and >= 0")
        require(0 <= self.probe_share <= 0.2, "probe_share", self.probe_share, "in [0, 0.2]")
        require(0 <= self.stragglers <= 4, "stragglers", self.stragglers, "in [0, 4] (0 is no weight)")
