"""Known faults of vLLM, dated: where each was seen, what goes wrong, and whether it is mended or refused.

A fault goes when no supported version has it: its test shows the fault on the unmended engine, and fails where there is
none. ``mend_process`` is called before a vLLM starts, ``mend_worker`` in each of its workers before a request runs.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from paceline.engines.vllm.mends import head_owner, keeping_its_own, replacements
from paceline.engines.vllm.versions import Version, installed, parsed
from paceline.schema import SamplingParams

_log = logging.getLogger("paceline.vllm")

#: Drafters of vLLM that run no model: their drafts end at the context by themselves.
_MODEL_FREE = ("custom_class", "ngram", "suffix")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. ``seen`` are the versions in which it was observed, ``since`` the first one that can have it and
    ``until`` the first one without it (None: none is known).

    ``number`` is the public report ("" where none was found on the day ``noted``). A ``lossy`` fault bends what is
    sampled. ``where`` is the platform that has it.
    """

    name: str
    what: str
    answer: Literal["mended", "refused"]
    noted: str
    seen: tuple[str, ...]
    number: str = ""
    since: Version | None = None
    until: Version | None = None
    where: Literal["anywhere", "cpu", "cpu without triton"] = "anywhere"
    lossy: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.number})" if self.number else self.name


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="expand_batch_to_tokens",
        number="vllm#55005",
        what="temperature, top_k and top_p of drafted tokens are read from uninitialised memory",
        answer="mended",
        noted="2026-11-30",
        seen=("0.24.0", "0.31.0", "0.32.0"),
        where="cpu without triton",
        lossy=True,
    ),
    Fault(
        name="top_k_without_drafts",
        what="a pass that verifies no draft ends the engine where a request has top_k and none has top_p",
        answer="mended",
        noted="2026-11-30",
        seen=("0.32.0",),
        where="cpu without triton",
    ),
    Fault(
        name="placeholder_drafts",
        what="the first pass of a request with one token to fill in is padded with placeholders, which are accepted: "
        "its first token then has the law of a later position",
        answer="mended",
        noted="2026-11-30",
        seen=("0.32.0",),
        where="cpu without triton",
        lossy=True,
    ),
    Fault(
        name="min_tokens_of_bonus",
        what="the token after a draft that was accepted whole may not stop where its pass began before min_tokens",
        answer="mended",
        noted="2026-11-30",
        seen=("0.32.0",),
        lossy=True,
    ),
    Fault(
        name="seeded_chunk",
        what="a pass that fills a part of the prompt of a request with a seed ends the engine",
        answer="mended",
        noted="2026-11-30",
        seen=("0.32.0",),
        where="cpu",
    ),
    Fault(
        name="tied_head",
        what="after a weight update a tied lm_head multiplies by the matrix that was packed from the old weights",
        answer="mended",
        noted="2026-11-30",
        seen=("0.32.0",),
        where="cpu",
        lossy=True,
    ),
    Fault(
        name="partial_layer",
        number="vllm#48312",
        what="a weight update that brings a part of a fused layer fills the rest of it with uninitialised memory",
        answer="mended",
        noted="2026-11-30",
        seen=("0.32.0",),
        lossy=True,
    ),
    Fault(
        name="shared_head",
        what="a head that drafts and whose output matrix equals the policy's gets the policy's own: new weights of "
        "either are then loaded into both",
        answer="mended",
        noted="2026-11-30",
        seen=("0.32.0",),
    ),
    Fault(
        name="ignored_parameters",
        what="neither min_p nor logit_bias is applied where vLLM speculates",
        answer="refused",
        noted="2026-11-30",
        seen=("0.32.0",),
        lossy=True,
    ),
    Fault(
        name="second_engine",
        what="a second engine in one process cannot be built: its kernels are registered over themselves",
        answer="mended",
        noted="2026-11-30",
        seen=("0.31.0", "0.32.0"),
        since=(0, 31),
        where="cpu without triton",
    ),
    Fault(
        name="long_row",
        number="vllm#58080",
        what="one sequence near the context limit stops the whole batch from drafting",
        answer="mended",
        noted="2026-11-30",
        seen=("0.32.0",),
    ),
)

_BY_NAME = {fault.name: fault for fault in FAULTS}
#: Faults that nobody meets who does not speculate.
_OF_DRAFTS = ("expand_batch_to_tokens", "placeholder_drafts", "min_tokens_of_bonus")
#: What is replaced in this process: the owner, its attribute and the original, by fault.
_replaced: dict[str, tuple[Any, str, Any]] = {}
_mended: set[str] = set()


def faults_here() -> dict[str, Fault]:
    """The faults that the installed vLLM has on this platform, by name; imports vLLM."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    on_cpu = bool(current_platform.is_cpu())
    places = {"anywhere": True, "cpu": on_cpu, "cpu without triton": on_cpu and not HAS_TRITON}
    return {name: fault for name, fault in faults_of(installed() or "").items() if places[fault.where]}


def faults_of(version: str) -> dict[str, Fault]:
    """The faults that a vLLM of ``version`` has on one platform or other, by name; imports no vLLM."""
    numbers = parsed(version)

    def has(fault: Fault) -> bool:
        after = fault.since is None or numbers is None or numbers >= fault.since
        return after and (fault.until is None or numbers is None or numbers < fault.until)

    return {fault.name: fault for fault in FAULTS if has(fault)}


def mend_process() -> list[str]:
    """Make this process fit for one vLLM after the other; returns the names of the faults that are mended.

    It changes nothing that a vLLM computes, so it is done whether or not faults are to be mended.
    """
    done = ["shared_head"] if keep_heads_apart() else []
    if "second_engine" not in faults_here():
        return done
    from vllm.platforms import current_platform

    kind = type(current_platform)
    register = kind.register_triton_kernel_overrides
    calls: list[bool] = []

    def once(*_: Any) -> None:
        if not calls:
            register()
            calls.append(True)

    _replace("second_engine", kind, "register_triton_kernel_overrides", once)
    return [*done, "second_engine"]


def keep_heads_apart() -> bool:
    """Have heads that draft keep their own output matrix; for each process that loads one, before it does."""
    owner = head_owner()
    if owner is None or "shared_head" not in faults_here():
        return False
    _mend("shared_head", owner, "_maybe_share_lm_head", keeping_its_own)
    return True


def mend_worker(runner: Any, mend: bool = True, *, transfers: bool = False) -> list[str]:
    """Mend what the worker of ``runner``, a model runner of vLLM, suffers from; returns the names, in order.

    With ``transfers`` new weights come through ``transfer.TransferEngine``, which mends what goes wrong there. With
    ``mend`` false whatever an earlier engine of this process had mended comes back.
    """
    here = faults_here()
    wanted: dict[str, Callable[[], bool]] = {
        **{name: partial(_mend, name, *how) for name, how in replacements().items()},
        "tied_head": lambda: transfers,
        "partial_layer": lambda: transfers,
        "long_row": lambda: _mend_long_row(runner),
    }
    _mended.clear()
    if not mend:
        for name in wanted:
            _restore(name)
        return []
    wanted["shared_head"] = lambda: "shared_head" in _replaced
    for name, action in wanted.items():
        if name in here and action():
            _say(here[name])
            _mended.add(name)
    return sorted(_mended)


def is_mended(name: str) -> bool:
    """Whether this worker's process mends the named fault."""
    return name in _mended


def refusal(params: SamplingParams, *, speculates: bool, mend: bool, allow_lossy: bool = False) -> str | None:
    """Why a request must be refused: one line that names the parameter; None where it can be honoured.

    With ``allow_lossy`` what bends the law without being named in the request passes.
    """
    if not speculates:
        return None
    here = faults_here()
    if "ignored_parameters" in here:
        for name in ("min_p", "logit_bias"):
            if getattr(params, name):
                return (
                    f"{name}={getattr(params, name)!r}: vLLM {installed()} does not apply it where it speculates; "
                    f"set drafter.kind=none, or leave {name} out"
                )
    if not mend and not allow_lossy and params.temperature > 0 and "expand_batch_to_tokens" in here:
        fault = here["expand_batch_to_tokens"]
        return (
            f"temperature={params.temperature}: in vLLM {installed()} {fault.what} ({fault.number}); "
            "set engine.vllm.mend=true, drafter.kind=none or temperature=0"
        )
    return None


def refit_refusal(*, tied: bool, partial: bool, mend: bool, allow_lossy: bool = False) -> str | None:
    """Why new weights must be refused: one line; None where they can be loaded.

    ``tied`` says that the policy ties its embeddings, ``partial`` that a fused layer gets a part of its weights.
    """
    if mend or allow_lossy:
        return None
    here = faults_here()
    for name, touched in (("tied_head", tied), ("partial_layer", partial)):
        if touched and name in here:
            return f"new weights: in vLLM {installed()} {here[name].what}; set engine.vllm.mend=true"
    return None


def standing(*, speculates: bool, mend: bool) -> tuple[str, ...]:
    """The lossy faults that an engine is left with, for its ``lossy`` stamp: none where they are mended."""
    if mend:
        return ()
    mendable = [fault for fault in faults_here().values() if fault.lossy and fault.answer == "mended"]
    return tuple(f"vLLM's fault {fault}" for fault in mendable if speculates or fault.name not in _OF_DRAFTS)


def _mend(name: str, owner: Any, attribute: str, make: Callable[[Any], Any]) -> bool:
    if name not in _replaced:
        _replace(name, owner, attribute, make(getattr(owner, attribute)))
    return True


def _mend_long_row(runner: Any) -> bool:
    speculative = getattr(runner, "speculative_config", None)
    if speculative is None or speculative.method not in _MODEL_FREE:
        return False
    runner.effective_drafter_max_model_len = runner.max_model_len + speculative.num_speculative_tokens + 1
    return True


def _replace(name: str, owner: Any, attribute: str, value: Any) -> None:
    if name not in _replaced:
        _replaced[name] = (owner, attribute, getattr(owner, attribute))
        setattr(owner, attribute, value)
        _say(_BY_NAME[name])


def _restore(name: str) -> None:
    if name in _replaced:
        owner, attribute, original = _replaced.pop(name)
        setattr(owner, attribute, original)


_said: set[str] = set()


def _say(fault: Fault) -> None:
    """Name a mended fault in the log, once a process."""
    if fault.name not in _said:
        _said.add(fault.name)
        _log.warning("vLLM %s: %s is mended: %s", installed(), fault, fault.what)
