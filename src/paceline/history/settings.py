"""What a history is built with, and which implementation serves."""

import os

import msgspec

from paceline.history import native as extension
from paceline.history.base import History


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """``window`` finished responses are kept a prompt, ``elsewhere_tokens`` tokens of all prompts' responses together.

    ``cap_bytes`` caps the memory of responses (0: no cap); the oldest go first, whole. ``floor`` is the least
    probability of a drafted node, ``matches`` how many places vote at most, of the prompt and of others each.
    ``threads`` work beside the caller's (-1: as many as there are spare cores, at most 3). ``patient`` waits for
    prefetched drafts that are not ready yet: drafts are then the same in every run. With ``chains`` a draft is a chain.
    """

    window: int = 64
    elsewhere_tokens: int = 1 << 20
    cap_bytes: int = 0
    siblings: bool = True
    floor: float = 0.002
    matches: int = 32
    threads: int = -1
    patient: bool = False
    chains: bool = False


def make_history(settings: Settings, native: bool = True) -> History:
    """The native history where it is built and wanted, else the plain-Python one."""
    options = msgspec.structs.asdict(settings)
    if settings.threads < 0:
        options["threads"] = min(3, (os.cpu_count() or 1) - 1)
    module = extension.load() if native else None
    if module is not None:
        history: History = module.History(**options)
        return history
    from paceline.history.plain import PlainHistory

    return PlainHistory(**options)
