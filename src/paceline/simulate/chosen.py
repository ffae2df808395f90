"""A drafter that was replayed, as settings: the section of a run of paceline, and what vLLM takes."""

from typing import Any

import msgspec
import yaml

from paceline import typed_yaml
from paceline.config import CotrainConfig, DrafterConfig

#: The plug-in, as vLLM is told to load it (docs/vllm.md).
PLUGIN = "paceline.integrations.vllm.HistoryProposer"

#: Models that vLLM drafts with by itself.
_IN_VLLM = ("eagle3", "mtp", "draft_model")
_LOOKUP = {"prompt_lookup": {}, "prompt_lookup_earliest": {"newest": False}}


def drafter_section(name: str, budget: int) -> DrafterConfig | None:
    """The section ``drafter`` that drafts as ``name`` does, a name as ``drafter_by_name`` takes it.

    None for a drafter that runs of paceline do not have. ``chains`` is left out: it is the engine that decides on it.
    """
    kind, _, options = name.partition(":")
    given = {
        key: yaml.safe_load(value) for key, _, value in (part.partition("=") for part in options.split(",") if part)
    }
    if kind == "history":
        given.pop("chains", None)
        tree: dict[str, Any] = {"kind": "history", "history": given}
    elif kind in _LOOKUP:
        tree = {"kind": "prompt_lookup", "prompt_lookup": _LOOKUP[kind] | given}
    else:
        return None
    return msgspec.convert(tree | {"budget": budget}, DrafterConfig)


def settings_tree(section: DrafterConfig | None, cotrain: CotrainConfig | None = None) -> dict[str, Any]:
    """The settings to write: kind and budget, and what differs from the defaults; None drafts nothing.

    ``cotrain`` is how the drafter is trained beside the policy, where that is known.
    """
    if section is None:
        return {"drafter": {"kind": "none"}}
    tree: dict[str, Any] = {"kind": section.kind, "budget": section.budget}
    for part in ("history", "prompt_lookup", "draft_model", "head", "hybrid"):
        differs = _differing(getattr(section, part), getattr(DrafterConfig(), part))
        if differs:
            tree[part] = differs
    taught = {} if cotrain is None else _differing(cotrain, CotrainConfig())
    return {"drafter": tree} | ({"cotrain": taught} if taught else {})


def _differing(section: msgspec.Struct, usual: msgspec.Struct) -> dict[str, Any]:
    own, others = (msgspec.to_builtins(of) for of in (section, usual))
    return {key: value for key, value in own.items() if value != others[key]}


def settings_yaml(tree: dict[str, Any], *remarks: str) -> bytes:
    """A file that ``paceline train`` takes: ``remarks`` as comments, then ``tree``."""
    return ("".join(f"# {line}\n" for line in remarks) + typed_yaml.dump(tree)).encode()


class VllmSettings(msgspec.Struct, kw_only=True):
    """Arguments of vLLM's ``LLM``. ``note``: where it drafts otherwise than what was replayed."""

    speculative_config: dict[str, Any]
    additional_config: dict[str, Any] | None = None
    note: str | None = None


def vllm_settings(name: str, budget: int) -> VllmSettings | None:
    """How vLLM drafts as ``name`` does: with its own n-grams where they are the same thing, else with the plug-in.

    None for a drafter that neither has. vLLM verifies chains: ``note`` says so where trees were replayed.
    """
    section = drafter_section(name, budget)
    if section is None:
        return None
    lookup = section.prompt_lookup
    if section.kind == "prompt_lookup" and not lookup.newest and not lookup.factor:
        ngrams = {"prompt_lookup_min": lookup.min_match, "prompt_lookup_max": lookup.max_match}
        return VllmSettings(speculative_config={"num_speculative_tokens": budget, "method": "ngram", **ngrams})
    tree = {key: value for key, value in settings_tree(section)["drafter"].items() if key != "budget"}
    is_tree = section.kind == "history" and not _chains(name)
    return VllmSettings(
        speculative_config={"num_speculative_tokens": budget, "method": "custom_class", "model": PLUGIN},
        additional_config={"paceline": {"drafter": tree}},
        note="trees were replayed, vLLM verifies chains: replay history:chains=true for its figures"
        if is_tree
        else None,
    )


def vllm_soft_settings(section: DrafterConfig, trained: str | None) -> VllmSettings | None:
    """How vLLM drafts with a model; None for those that it has no counterpart of.

    ``trained`` is where a head lies that the section itself has no files of.
    """
    if section.kind not in _IN_VLLM:
        return None
    path = section.draft_model.path if section.kind == "draft_model" else section.head.path
    model = {} if path is None and trained is None else {"model": path or trained}
    note = "the head as it was at the run's end: paceline draft export makes vLLM's files of it" if trained else None
    if not model and section.kind == "eagle3":
        note = "vLLM loads the head from files: train one with paceline draft train and export it"
    return VllmSettings(
        speculative_config={"num_speculative_tokens": section.budget, "method": section.kind, **model},
        note=None if path else note,
    )


def _chains(name: str) -> bool:
    """Whether the history drafter of that name was told to draft chains."""
    options = dict(part.partition("=")[::2] for part in name.partition(":")[2].split(",") if part)
    return bool(yaml.safe_load(options.get("chains", "false")))
