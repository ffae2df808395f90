"""What an audit asks of an engine: requests with the parameters and drafts under which verifiers were seen to fail."""

from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from paceline.audit.toys import ToyPolicy, constant, fixture, markov, tail, toy_drafter, wide
from paceline.schema import RolloutRequest, SamplingParams, as_tokens, derive_seed


@dataclass(frozen=True)
class Case:
    """One batch of requests on a toy policy. ``params`` are keyword arguments of ``SamplingParams``.

    ``options`` are those of the engine and its drafter. ``cells`` maps tokens to the cells of a test of their own, for
    a policy whose tokens are too many to be told apart. ``seeded`` false leaves the seeds to the engine. ``drafted``
    false audits the engine's own sampling: the rare tokens of a long tail are drawn where nothing is drafted.
    """

    name: str
    policy: ToyPolicy
    drafter: ToyPolicy
    requests: int
    params: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    cells: tuple[int, ...] = ()
    seeded: bool = True
    drafted: bool = True

    def make_requests(self, params: SamplingParams, seed: int) -> list[RolloutRequest]:
        """The case's requests; they differ in their noise and in the last tokens of their prompts."""
        prompts = [(1, index % min(4, self.policy.vocabulary)) for index in range(self.requests)]
        return [
            RolloutRequest(
                request_id=f"{self.name}/{index}",
                prompt=as_tokens(prompt),
                params=replace(params, seed=derive_seed("audit", seed, self.name, index)) if self.seeded else params,
                group=f"{self.name}/{index % 4}",
            )
            for index, prompt in enumerate(prompts)
        ]


def toy_cases(scale: float = 1.0) -> list[Case]:
    """The cases of the toy audit; ``scale`` multiplies the number of requests of each.

    Between them they put every processor, chains, trees and empty drafts, stops and all length limits before the
    verifier, on laws that are flat, peaked, long-tailed and different after every two tokens.
    """
    # The policy of which top_k 2 keeps (1/3, 2/3), with a drafter whose own top two are others.
    top_two = constant("top two", (0.3, 0.6, 0.1)), constant("top two, drafter", (0.5, 0.3, 0.2))
    # Logits whose size, not only their differences, matters to a repetition penalty: (2, 1, 0).
    falling = constant("falling", (0.665241, 0.244728, 0.090031))
    falling = ToyPolicy("falling", falling.table - falling.table[..., -1:], falling.stop_ids)
    flat, context = fixture(), markov()
    far = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 1.0}
    cut = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
    shaped = {"bad_words": ((2, 3), (4,)), "min_tokens": 3, "logit_bias": {1: 0.7, 5: -1.0}}
    table: list[tuple[str, ToyPolicy, int, dict[str, Any], dict[str, Any]]] = [
        ("plain", flat, 800, {}, {}),
        ("heat", flat, 400, {"temperature": 0.5}, {}),
        ("biased", flat, 400, {"min_p": 0.5, "logit_bias": {2: 1.0}}, {}),
        ("repeats", falling, 400, {"repetition_penalty": 2.0}, {}),
        ("context", context, 1200, {}, {}),
        ("ragged", context, 800, {}, {"ragged": True}),
        ("tree", context, 800, {}, {"width": 3, "depth": 3, "budget": 9}),
        ("penalties", context, 500, far, {}),
        ("counts", context, 600, {"frequency_penalty": 1.0}, {"width": 2, "depth": 3}),
        ("cut", context, 800, cut, {}),
        ("shaped", context, 800, shaped, {}),
        ("raw", context, 600, {"temperature": 0.5, "logprobs": "raw"}, {}),
        ("half", context, 600, {"temperature": 0.5}, {}),
        ("allowed", context, 600, {"allowed_token_ids": (0, 2, 3, 7), "min_p": 0.1}, {}),
        ("greedy", context, 200, {"temperature": 0.0}, {}),
        ("one", flat, 200, {"top_k": 1}, {}),
        ("five", context, 800, {"max_tokens": 5}, {}),
        ("seven", context, 800, {"max_tokens": 7, "ignore_eos": True}, {"depth": 5}),
        ("limit", context, 400, {"max_tokens": 64, "ignore_eos": True}, {"context": 16}),
    ]
    cases = [
        Case(name, policy, toy_drafter(policy), max(int(count * scale), 8), {"max_tokens": 16, **params}, options)
        for name, policy, count, params, options in table
    ]
    cases.append(Case("top two", *top_two, max(int(600 * scale), 8), {"max_tokens": 16, "top_k": 2}))
    groups = {"n": 64, "max_tokens": 20}
    cases.append(Case("groups", wide(), toy_drafter(wide()), 4, groups, seeded=False))
    rare = tail()
    parity = tuple(0 if token == 0 else 1 + token % 2 for token in range(rare.vocabulary))
    many = {"n": max(int(1024 * scale), 8), "max_tokens": 128}
    cases.append(Case("tail", rare, toy_drafter(rare), 1, many, {"slots": 256}, cells=parity, drafted=False))
    return cases
