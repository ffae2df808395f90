"""A drafter that was replayed, as settings: the section of a run of paceline, and what vLLM takes."""

from typing import Any

import msgspec
import yaml

from paceline import typed_yaml
from paceline.config import DrafterConfig

#: The plug-in, as vLLM is told to load it (docs/vllm.md).
PLUGIN = "paceline.integrations.vllm.HistoryProposer"

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


def settings_tree(section: DrafterConfig | None) -> dict[str, Any]:
    """The settings to write: kind and budget, and what differs from the defaults; None drafts nothing."""
    if section is None:
        return {"drafter": {"kind": "none"}}
    tree: dict[str, Any] = {"kind": section.kind, "budget": section.budget}
    for part in ("history", "prompt_lookup"):
        own, usual = (msgspec.to_builtins(getattr(of, part)) for of in (section, DrafterConfig()))
        differs = {key: value for key, value in own.items() if value != usual[key]}
        if differs:
            tree[part] = differs
    return {"drafter": tree}


def settings_yaml(section: DrafterConfig | None, *remarks: str) -> bytes:
    """A file that ``paceline train`` takes: ``remarks`` as comments, then ``settings_tree``."""
    return ("".join(f"# {line}\n" for line in remarks) + typed_yaml.dump(settings_tree(section))).encode()


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


def _chains(name: str) -> bool:
    """Whether the history drafter of that name was told to draft chains."""
    options = dict(part.partition("=")[::2] for part in name.partition(":")[2].split(",") if part)
    return bool(yaml.safe_load(options.get("chains", "false")))
