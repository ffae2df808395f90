"""Small recorded traces and scripted drafters, for tests of the replay."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from paceline.schema import Draft, RolloutRequest, as_tokens
from paceline.simulate.logs import Recorded, Step

PROMPT = (7, 8, 9)


def recorded(tokens: Sequence[int], epoch: int = 0, prompt: Sequence[int] = PROMPT) -> Recorded:
    key = RolloutRequest(request_id="recorded", prompt=as_tokens(prompt)).prompt_key
    return Recorded(as_tokens(prompt), as_tokens(tokens), key, epoch)


def step(number: int, *responses: Sequence[int], epoch: int = 0) -> Step:
    """A step whose responses all answer the same prompt."""
    return Step(number, [recorded(tokens, epoch) for tokens in responses])


def write_lines(path: Path, rows: Sequence[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_trace(folder: Path, steps: Sequence[Sequence[Sequence[int]]], name: str = "tiny") -> Path:
    """``NAME.jsonl`` and ``NAME.prompts.jsonl``: one prompt, one epoch a step."""
    write_lines(folder / f"{name}.prompts.jsonl", [{"prompt_id": 0, "tokens": list(PROMPT)}])
    rows = [
        {"epoch": s, "step": s, "prompt_id": 0, "sample_idx": i, "reward": 1.0, "tokens": list(tokens)}
        for s, responses in enumerate(steps)
        for i, tokens in enumerate(responses)
    ]
    return write_lines(folder / f"{name}.jsonl", rows)


class Scripted:
    """Drafts what ``script(context, budget)`` says: None, tokens, or keyword arguments of a Draft; keeps every call."""

    def __init__(self, script: Callable[[list[int], int], object]) -> None:
        self.script = script
        self.calls: list[tuple[str, object]] = []
        self.contexts: dict[str, list[int]] = {}

    def start(self, requests):
        self.calls.append(("start", [request.request_id for request in requests]))
        self.contexts |= {request.request_id: request.prompt.tolist() for request in requests}

    def propose(self, request_ids, budget):
        self.calls.append(("propose", list(request_ids)))
        return [draft for name in request_ids if (draft := self._draft(name, budget)) is not None]

    def _draft(self, name, budget):
        said = self.script(self.contexts[name], budget)
        if said is None:
            return None
        fields = said if isinstance(said, dict) else {"tokens": said}
        fields = {"length": len(self.contexts[name])} | fields
        for key, kind in (("tokens", np.int32), ("parents", np.int32), ("probs", np.float32)):
            if fields.get(key) is not None:
                fields[key] = np.array(fields[key], dtype=kind)
        return Draft(request_id=name, **fields)

    def commit(self, outcomes):
        self.calls.append(("commit", [(o.request_id, o.tokens.tolist(), o.accepted, o.drafted) for o in outcomes]))
        for outcome in outcomes:
            self.contexts[outcome.request_id] += outcome.tokens.tolist()

    def finish(self, rollouts):
        self.calls.append(("finish", [rollout.request_id for rollout in rollouts]))

    def on_weights(self, version):
        self.calls.append(("on_weights", version))

    def of(self, name):
        return [what for call, what in self.calls if call == name]


def oracle(*responses: Sequence[int]) -> Callable[[list[int], int], list[int] | None]:
    """A script that knows what comes: the rest of the response that begins as the context's does."""

    def script(context: list[int], budget: int) -> list[int] | None:
        said = context[len(PROMPT) :]
        for response in responses:
            if list(response[: len(said)]) == said:
                return list(response[len(said) : len(said) + budget])
        return None

    return script
