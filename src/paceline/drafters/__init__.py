"""Who proposes: drafters behind one seam."""

from paceline.config import INSIDE_VLLM, MODELS, DrafterConfig
from paceline.drafters.base import Drafter, Learned, PolicyTraits, Remembers
from paceline.drafters.forced import ForcedDrafter
from paceline.drafters.guarded import GuardedDrafter
from paceline.drafters.history import HistoryDrafter
from paceline.drafters.hybrid import HybridDrafter
from paceline.drafters.isolated import IsolatedDrafter, IsolatedHistoryDrafter
from paceline.drafters.prefetch import PrefetchingDrafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.sampling.grammar import Vocabulary
from paceline.schema import PacelineError

__all__ = [
    "Drafter",
    "ForcedDrafter",
    "GuardedDrafter",
    "HistoryDrafter",
    "HybridDrafter",
    "IsolatedDrafter",
    "IsolatedHistoryDrafter",
    "PolicyTraits",
    "PrefetchingDrafter",
    "PromptLookupDrafter",
    "history_of",
    "learned_of",
    "make_drafter",
]


def make_drafter(
    config: DrafterConfig,
    salt: int | None = None,
    vocabulary: Vocabulary | None = None,
    policy: PolicyTraits | None = None,
    chains: bool = False,
) -> Drafter | None:
    """The drafter that a configuration asks for; None for ``none`` and for a budget of 0.

    ``salt`` keys the hashes that stand for prompts in snapshots; None draws one. ``vocabulary`` is given where requests
    have grammars, ``policy`` where a model may draft. With ``chains`` it drafts chains, for an engine that verifies no
    trees. PacelineError where the drafter needs one that is not given, drafts inside vLLM only, or drafts trees only,
    and ModelError where its model cannot be used.
    """
    if config.kind == "none" or config.budget == 0:
        return None
    if config.kind == "forced":
        if vocabulary is None:
            raise PacelineError(
                "drafter.kind=forced drafts what a grammar forces, and there is no grammar; choose another"
            )
        return ForcedDrafter(None, vocabulary)
    drafter = _unforced(config, salt, vocabulary, policy, chains)
    return ForcedDrafter(drafter, vocabulary) if config.forced and vocabulary is not None else drafter


def history_of(drafter: Drafter | None) -> Remembers | None:
    """The drafter with a memory that ``drafter`` is or drafts with; None where there is none, or it is lost."""
    if isinstance(drafter, GuardedDrafter) and drafter.lost:
        return None
    inmost = _inmost(drafter)
    if isinstance(inmost, HybridDrafter):
        return history_of(inmost.history)
    return inmost if isinstance(inmost, Remembers) else None


def learned_of(drafter: Drafter | None) -> Learned | None:
    """The drafter with weights that ``drafter`` is or drafts with, lost or not; None where there is none."""
    inmost = _inmost(drafter)
    return inmost if isinstance(inmost, Learned) else None


def _inmost(drafter: Drafter | None) -> Drafter | None:
    while isinstance(drafter, ForcedDrafter | GuardedDrafter):
        drafter = drafter.inner
    return drafter


def _unforced(
    config: DrafterConfig,
    salt: int | None,
    vocabulary: Vocabulary | None,
    policy: PolicyTraits | None,
    chains: bool,
) -> Drafter:
    if config.kind in INSIDE_VLLM:
        raise PacelineError(
            f"drafter.kind={config.kind} drafts inside vLLM only; set engine.kind=vllm, or choose another"
        )
    if config.kind in MODELS:
        return _model(config, policy, vocabulary, chains)
    if config.isolate:
        separate = IsolatedHistoryDrafter if config.kind == "history" else IsolatedDrafter
        return separate(config, salt, chains)
    if config.kind == "prompt_lookup":
        lookup = config.prompt_lookup
        return PromptLookupDrafter(lookup.min_match, lookup.max_match, lookup.factor, lookup.newest)
    kind = PrefetchingDrafter if config.history.prefetch else HistoryDrafter
    history = kind.from_config(config.history, salt, chains)
    if isinstance(history, PrefetchingDrafter):
        history.outcomes = config.history.prefetch
    if config.kind == "hybrid":
        model = _model(config, policy, vocabulary, chains)
        coupled = policy is None or policy.acceptance == "coupled"
        return HybridDrafter(history, model, config.hybrid, coupled=coupled, chains=chains)
    return history


def _model(config: DrafterConfig, policy: PolicyTraits | None, vocabulary: Vocabulary | None, chains: bool) -> Drafter:
    kind, section = config.model_kind, "draft_model" if config.model_kind == "draft_model" else "head"
    if policy is None:
        raise PacelineError(f"drafter.kind={kind} needs a policy whose vocabulary it shares; choose another")
    if chains and getattr(config, section).width > 1:
        raise PacelineError(f"drafter.{section}.width: this engine verifies chains only; set it to 1")
    # Only here, so that drafters without a model load no torch.
    if kind == "draft_model":
        from paceline.drafters.draft_model import DraftModelDrafter

        return DraftModelDrafter.from_config(config.draft_model, policy, vocabulary)
    if kind == "block":
        from paceline.drafters.block import BlockDrafter

        return BlockDrafter.from_config(kind, config.head, policy, vocabulary)
    if kind in ("eagle3", "mtp"):
        from paceline.drafters.head import HeadDrafter

        return HeadDrafter.from_config(kind, config.head, policy, vocabulary)
    raise PacelineError(f"drafter.kind={kind}: no such drafter in this engine; choose another")
