"""The sections about engines."""

import re
from typing import Any, Literal

import msgspec

from paceline.config.base import Section, require
from paceline.config.drafter import BudgetConfig, DrafterConfig


class SentinelConfig(Section):
    """What is checked after every refit. ``canaries`` prompts (0: none) are answered with ``tokens`` tokens each.

    Their acceptance must hold: at least ``hold`` times what it was before. A drafter with weights of its own may be
    ``gap`` versions behind the policy. With ``checksums``, weights that must not have moved are compared.
    """

    canaries: int = 4
    tokens: int = 16
    hold: float = 0.5
    gap: int = 1
    checksums: bool = True

    def __post_init__(self) -> None:
        require(0 <= self.canaries <= 256, "canaries", self.canaries, "in [0, 256] (0 is off)")
        require(self.tokens >= 2, "tokens", self.tokens, ">= 2: the first token of an answer is never drafted")
        require(0 < self.hold <= 1, "hold", self.hold, "in (0, 1]")
        require(self.gap >= 0, "gap", self.gap, ">= 0")


class VllmConfig(Section):
    """What is special to the engine of kind ``vllm``.

    ``front`` is vLLM's offline ``LLM`` or its ``AsyncLLM``. With ``in_process`` the offline engine's core runs in this
    process. ``pause`` says what becomes of requests in flight while weights move. ``sleep`` is the level at which it
    sleeps outside generation (0: never). With ``mend`` false known faults of the installed vLLM are refused instead of
    worked around. ``options`` are further engine arguments of vLLM, ``speculative`` further keys of its
    ``speculative_config``.
    """

    front: Literal["offline", "async"] = "offline"
    in_process: bool = True
    pause: Literal["keep", "wait", "abort"] = "keep"
    sleep: int = 0
    mend: bool = True
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    speculative: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.sleep in (0, 1, 2), "sleep", self.sleep, "0 (never), 1 or 2, a sleep level of vLLM")


#: Settings of the reference engine that vLLM has no counterpart of.
_REFERENCE_ONLY = ("scouts", "acceptance", "invariant", "self_check", "verifier")


class EngineConfig(Section):
    """The engine: ``hf`` is the reference engine, ``vllm`` drives vLLM. ``kv_tokens`` caps the KV cache (0: no cap).

    Where requests outnumber the slots, ``scouts`` of each group start before the others (0: in the order of arrival).
    ``acceptance`` says how drafts that were drawn from a distribution are verified: ``coupled`` keeps every token
    independent of the drafter, ``rejection`` and ``block`` keep the law only. ``invariant`` gives equal logits, bit for
    bit, whatever the shape of the pass (float32 on the CPU). With ``self_check`` a policy whose packed forward pass
    differs from its own is refused when it is loaded. ``verifier`` is ``module:function`` in the place of
    ``sampling.accept.accept``, for research; it takes ``allow_lossy``.
    """

    kind: Literal["hf", "vllm"] = "hf"
    slots: int = 32
    max_batched_tokens: int = 2048
    kv_tokens: int = 0
    context: int = 0
    share_prompts: bool = True
    scouts: int = 2
    refit_kv: Literal["recompute", "keep"] = "recompute"
    acceptance: Literal["coupled", "rejection", "block"] = "coupled"
    invariant: bool = False
    self_check: bool = True
    verifier: str | None = None
    vllm: VllmConfig = msgspec.field(default_factory=VllmConfig)
    sentinel: SentinelConfig = msgspec.field(default_factory=SentinelConfig)

    def __post_init__(self) -> None:
        require(self.slots >= 1, "slots", self.slots, ">= 1")
        least = f"at least slots ({self.slots}), so that every running request can decode"
        require(self.max_batched_tokens >= self.slots, "max_batched_tokens", self.max_batched_tokens, least)
        require(self.kv_tokens >= 0, "kv_tokens", self.kv_tokens, ">= 0 (0 is no cap)")
        require(self.context >= 0, "context", self.context, ">= 0 (0 is the model's own)")
        require(self.scouts >= 0, "scouts", self.scouts, ">= 0 (0 is the order of arrival)")
        named = self.verifier is None or re.fullmatch(r"[\w.]+:\w+", self.verifier)
        require(bool(named), "verifier", self.verifier, "module:function, or null for paceline's own")
        for key in _REFERENCE_ONLY if self.kind == "vllm" else ():
            default = next(field.default for field in msgspec.structs.fields(self) if field.name == key)
            value = getattr(self, key)
            require(value == default, key, value, f"left at {default!r} where kind is vllm, which has no such setting")


class PluginConfig(Section):
    """paceline inside somebody else's vLLM: its ``additional_config["paceline"]``.

    ``drafter.budget`` is vLLM's ``num_speculative_tokens`` there. ``snapshot`` is the file that history is read from at
    the start, where it is there, and written to at shutdown. ``mend`` works around known faults of the installed vLLM.
    """

    drafter: DrafterConfig = msgspec.field(default_factory=DrafterConfig)
    budget: BudgetConfig = msgspec.field(default_factory=BudgetConfig)
    snapshot: str | None = None
    mend: bool = True

    def __post_init__(self) -> None:
        drafts = self.drafter.kind in ("history", "prompt_lookup")
        require(drafts, "drafter.kind", self.drafter.kind, "history or prompt_lookup: these draft without a model")
        require(self.snapshot != "", "snapshot", self.snapshot, "a file, or null for none")
