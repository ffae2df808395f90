"""What vLLM knows of a request, in paceline's terms."""

from collections.abc import Collection
from typing import Any

from paceline.drafters.follower import Introduced
from paceline.schema import RolloutRequest, SamplingParams

#: Keys of vLLM's ``SamplingParams.extra_args`` (over HTTP: ``vllm_xargs``).
GROUP = "paceline_group"
PROMPT_KEY = "paceline_prompt_key"
SPECULATE = "paceline_speculate"
STOP = "paceline_stop"
REQUEST = "paceline_request"
_UNLIMITED = 1 << 30
#: So many groups that have left the engine are held before they are forgotten.
_SPARE_GROUPS = 64


class Groups:
    """Which memory siblings share: that of the first of their group, as long as one of them is in the engine."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, list[str]]] = {}

    def __len__(self) -> int:
        return len(self._first)

    def prompt_key(self, group: str, own: str, request_id: str, alive: Collection[str]) -> str:
        """The prompt key of the group's first request; ``own`` where this request is the first."""
        key, members = self._first.get(group, (own, []))
        members = [name for name in members if name in alive and name != request_id]
        if not members:
            key = own
            if len(self._first) > _SPARE_GROUPS + len(alive):
                self._first = {name: entry for name, entry in self._first.items() if any(m in alive for m in entry[1])}
        self._first[group] = key, [*members, request_id]
        return key


def introduced(request_id: str, state: Any, groups: Groups, alive: Collection[str]) -> Introduced | None:
    """A request that vLLM's model runner holds in ``state``; None where it has no tokens to follow or samples none.

    Requests of one ``paceline_group`` are siblings, and so are those of equal prompts. A ``paceline_prompt_key`` names
    the prompt over the epochs where its tokens do not, ``paceline_request`` the request in reports, and
    ``paceline_stop`` has the strings at which whoever drives vLLM ends it.
    """
    params = state.sampling_params
    if params is None or not state.prompt_token_ids:
        return None
    extra = params.extra_args or {}
    most = params.max_tokens or _UNLIMITED
    request = RolloutRequest(
        request_id=str(extra.get(REQUEST) or request_id),
        prompt=state.prompt_token_ids,
        params=SamplingParams(
            max_tokens=most,
            min_tokens=min(params.min_tokens, most),
            ignore_eos=params.ignore_eos,
            stop=(*_texts(params.stop), *_texts(extra.get(STOP))),
        ),
        group=str(extra.get(GROUP) or ""),
        prompt_key=str(extra.get(PROMPT_KEY) or ""),
        speculate=_truth(extra.get(SPECULATE, True)),
    )
    if request.group and not extra.get(PROMPT_KEY):
        request.prompt_key = groups.prompt_key(request.group, request.prompt_key, request_id, alive)
    # With ``ignore_eos``, vLLM counts the end of sequence among all stop ids and does not stop at it.
    stop_ids = params.stop_token_ids if params.ignore_eos else params.all_stop_token_ids
    return Introduced(request=request, stop_ids=tuple(stop_ids or ()), max_tokens=most)


def _texts(value: Any) -> tuple[str, ...]:
    """The stop strings in ``value``; what no response can say, or is no text, stops nothing and is left out."""
    found = []
    for text in [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else ():
        try:
            found += SamplingParams.taken("stop", text)
        except ValueError:
            continue
    return tuple(found)


def _truth(value: Any) -> bool:
    """Over HTTP a truth value may arrive as text."""
    return value.strip().lower() not in ("false", "0", "no") if isinstance(value, str) else bool(value)
