"""Drafters by the names that the command line takes: ``name`` or ``name:key=value,key=value``."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import yaml

from paceline.config import HistoryConfig
from paceline.drafters import HistoryDrafter, PrefetchingDrafter
from paceline.drafters.base import Drafter
from paceline.drafters.baselines import BASELINES
from paceline.schema import PacelineError


def _history(chains: bool = False, **options: Any) -> Drafter:
    """The history drafter; its options are the keys of ``drafter.history``, and chains. Equal calls draft equally."""
    config = msgspec.convert(options, HistoryConfig)
    # A replay has no pass to prepare drafts under, so it waits for them.
    settings = msgspec.structs.replace(HistoryDrafter.from_config(config, salt=0, chains=chains).settings, patient=True)
    if config.prefetch:
        return PrefetchingDrafter(settings, salt=0, outcomes=config.prefetch)
    return HistoryDrafter(settings, salt=0)


DRAFTERS: dict[str, Callable[..., Drafter]] = {"history": _history, **BASELINES}


def split_names(text: str) -> list[str]:
    """The drafters of a list ``a,b:key=value,key=value,c``: a part ``key=value`` belongs to the name before it."""
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if names and "=" in part and ":" not in part.partition("=")[0]:
            names[-1] += ("," if ":" in names[-1] else ":") + part
        else:
            names.append(part)
    if not names:
        raise PacelineError(f"--drafters {text!r}: names no drafter; known: {', '.join(DRAFTERS)}")
    return names


def drafter_by_name(name: str) -> Drafter:
    """A fresh drafter. Options are arguments of its constructor; their values are read as YAML.

    Raises PacelineError in one line for an unknown name, an unknown option and a value that is refused.
    """
    kind, _, options = name.partition(":")
    if kind not in DRAFTERS:
        raise PacelineError(
            f"--drafters: unknown drafter {kind!r}{_hint(kind, DRAFTERS)}; known: {', '.join(DRAFTERS)}"
        )
    build = DRAFTERS[kind]
    known = _options(build)
    chosen: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        key, is_pair, value = part.partition("=")
        if not is_pair:
            raise PacelineError(f"--drafters {name}: write the option {part!r} as key=value")
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise PacelineError(f"--drafters {name}: unknown option {key!r}{_hint(key, known)}; {takes}")
        try:
            chosen[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise PacelineError(f"--drafters {name}: {key}={value}: not a value") from None
    try:
        return build(**chosen)
    except (TypeError, ValueError, msgspec.ValidationError, PacelineError) as error:
        raise PacelineError(f"--drafters {name}: {str(error).replace('`', '')}") from None


def _options(build: Callable[..., Drafter]) -> list[str]:
    """The keyword arguments that ``build`` takes."""
    takers = (HistoryConfig, build) if build is _history else (build,)
    parameters = [p for taker in takers for p in inspect.signature(taker).parameters.values()]
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _hint(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""
