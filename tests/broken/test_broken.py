"""Every broken engine shows its fault, with the faulty value that was reported where there is one; controls do not.

These tests say ``fault``, not ``field``: they show what an audit must catch, and keep nothing out by themselves.
"""

from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np
import pytest
import torch

from broken.registry import BROKEN, CONTROLS, falling_logits, top_two_drafter, top_two_policy
from paceline.audit.engine import ToyEngine
from paceline.audit.toys import ToyPolicy, constant, fixture, markov, response_law, tail, toy_drafter
from paceline.engines.intake import RequestError
from paceline.sampling.processors import Spec
from paceline.sampling.rows import VerifyRow, chain_parents
from paceline.schema import Rollout, RolloutRequest, SamplingParams, as_tokens
from scripted import ScriptedDrafter
from toys import total_variation

DRAWS = 12_000  # sampling noise in total variation is about .005
ARGMAX = constant("always token 2", (1e-30, 1e-30, 1.0))


@lru_cache
def asked(count: int) -> list[RolloutRequest]:
    """Requests that differ in their noise alone."""
    return [RolloutRequest(request_id=str(i), prompt=as_tokens([1])) for i in range(count)]


def first_tokens(target, policy, drafter, params, **options) -> np.ndarray:
    """The first tokens of many responses, before each of which ``drafter`` drafted at one depth."""
    engine = target.build(policy, drafter, depth=1, **options)
    requests = [msgspec.structs.replace(request, params=params) for request in asked(DRAWS)]
    engine.drafter.start(requests)
    drafts = engine.drafter.propose([request.request_id for request in requests], engine.budget)
    spec, none = Spec(params), as_tokens([])
    rows = [
        VerifyRow(
            request.request_id, spec, request.seed, request.prompt, none, draft.tokens,
            chain_parents(1) if draft.parents is None else draft.parents, draft.laws, draft.law_of,
        )
        for request, draft in zip(requests, drafts, strict=True)
    ]  # fmt: skip
    return np.array([verdict.tokens[0] for verdict in engine.verify(engine.logits(rows), rows, engine.seed)])


#: name, policy, drafter, parameters, the faulty law, the right one
P, HALF = (0.5, 0.3, 0.2), (0.6579, 0.2368, 0.1053)
LAWS = [
    ("argmax-of-soft-law", fixture, None, {}, (0.5, 0.1667, 0.3333), P),  # fault A1
    (
        "law-before-top-k",
        top_two_policy,
        top_two_drafter,
        {"top_k": 2},
        (0.4167, 0.5833, 0),
        (1 / 3, 2 / 3, 0),
    ),  # fault A2
    ("fresh-sample", fixture, None, {}, (0.4, 0.32, 0.28), P),  # fault A3
    ("one-stream", fixture, None, {}, (0.55, 0.45, 0), P),  # fault A4
    ("zeroed-in-place", fixture, None, {}, (0.625, 0.375, 0), P),  # fault A6
    ("temperature-ignored", fixture, None, {"temperature": 0.5}, P, HALF),  # fault A7
    ("temperature-twice", fixture, None, {"temperature": 0.5}, (0.8657, 0.1122, 0.0222), HALF),  # fault A7
    ("probabilities-as-logits", fixture, None, {}, (0.3907, 0.3199, 0.2894), P),  # fault A7
    ("argmax-of-residual", fixture, None, {}, (0.6, 0.2, 0.2), P),  # fault A8
    ("argmax-of-residual", fixture, lambda policy: ARGMAX, {}, (0.8, 0, 0.2), P),  # fault A8
    ("no-truncation", fixture, None, {"top_k": 1}, P, (1, 0, 0)),  # fault A9
    ("greedy-acceptance", fixture, None, {}, (1, 0, 0), P),  # fault A15
    ("parameters-ignored", fixture, None, {"logit_bias": {2: 1.0}}, P, (0.3722, 0.2233, 0.4046)),  # fault D6
]


@pytest.mark.parametrize(("name", "policy", "drafter", "fields", "faulty", "right"), LAWS)
def test_a_broken_law_is_the_one_that_was_reported(name, policy, drafter, fields, faulty, right):
    law = (drafter or toy_drafter)(policy())
    tokens = first_tokens(BROKEN[name], policy(), law, SamplingParams(**fields))
    assert total_variation(tokens, faulty) < 0.01
    assert total_variation(tokens, right) > 0.03


@pytest.mark.parametrize(
    ("name", "policy", "fields", "right"),
    [
        ("paceline", fixture, {}, P),
        ("paceline-rejection", top_two_policy, {"top_k": 2}, (1 / 3, 2 / 3, 0)),
        ("paceline-block", fixture, {"temperature": 0.5}, HALF),
        ("plain-rejection", fixture, {}, P),
        ("plain-rejection", fixture, {"temperature": 0.5}, HALF),
        ("plain-rejection", top_two_policy, {"top_k": 2}, (1 / 3, 2 / 3, 0)),
        ("try-in-order", fixture, {}, P),
    ],
)
def test_the_controls_keep_the_law(name, policy, fields, right):  # field A18
    width = 2 if name == "try-in-order" else 1
    tokens = first_tokens(CONTROLS[name], policy(), toy_drafter(policy()), SamplingParams(**fields), width=width)
    assert total_variation(tokens, right) < 0.01


def run(target, count=40, speculate=True, max_tokens=0, **options) -> tuple[list[Rollout], ToyEngine]:
    """Rollouts of a broken engine where its fault shows, and the engine."""
    policy = target.policy()
    params = msgspec.structs.replace(target.params, max_tokens=max_tokens or target.params.max_tokens)
    engine = target.build(policy, target.drafter(policy) if speculate else None, **{**target.options, **options})
    requests = [RolloutRequest(request_id=f"r{i}", prompt=as_tokens([1, 0]), params=params) for i in range(count)]
    return engine.generate(requests), engine


def same(one: Sequence[Rollout], other: Sequence[Rollout]) -> bool:
    return [r.tokens.tolist() for r in one] == [r.tokens.tolist() for r in other]


@pytest.mark.parametrize("name", [name for name in CONTROLS if name != "paceline"])
def test_the_controls_keep_the_law_of_pairs_behind_accepted_tokens(name):  # field A18
    policy, count, prompt = markov(), 3000, as_tokens([1])
    engine = CONTROLS[name].build(policy, toy_drafter(policy), slots=count, depth=3, width=1 if "block" in name else 2)
    params = SamplingParams(max_tokens=3, n=count)
    pairs = np.zeros((8, 8))
    for rollout in engine.generate([RolloutRequest(request_id="r", prompt=prompt, params=params)]):
        if len(rollout.tokens) > 2:
            pairs[rollout.tokens[1], rollout.tokens[2]] += 1
    expected = count * response_law(policy, params, prompt).pairs(1)[:7]
    chi_squared = ((pairs[:7] - expected) ** 2 / expected).sum()
    assert chi_squared < 56 + 5 * np.sqrt(2 * 56)
    assert engine.stats().tokens_accepted > count / 3


def test_the_drafted_token_is_zeroed_in_the_callers_tensor():  # fault A6
    logits = torch.tensor([P, P], dtype=torch.float64).log()
    row = VerifyRow("r", Spec(SamplingParams()), 0, as_tokens([0]), as_tokens([]), as_tokens([2]), chain_parents(1))
    BROKEN["zeroed-in-place"].build(fixture()).verify(logits, [row], 0)
    assert logits[0, 2] == -torch.inf


# Noise


def test_ranks_with_noise_of_their_own_disagree():  # fault A10
    for speculate in (True, False):
        ranks = [run(BROKEN["own-noise"], speculate=speculate)[0] for _ in range(2)]
        assert not same(*ranks)
        assert same(*(run(BROKEN["zero-for-accepted"], speculate=speculate)[0] for _ in range(2)))


def test_unseeded_requests_that_share_a_stream_are_identical():  # fault A11
    target = BROKEN["shared-stream"]
    rollouts, _ = run(target, count=1, speculate=False)
    assert len(rollouts) == 64
    assert len({tuple(rollout.tokens) for rollout in rollouts}) == 1
    engine = CONTROLS["paceline"].build(target.policy())
    request = RolloutRequest(request_id="r", prompt=as_tokens([1]), params=target.params)
    assert len({tuple(rollout.tokens) for rollout in engine.generate([request])}) == 64


def test_tokens_depend_on_the_batch():  # fault A12
    alone, _ = run(BROKEN["batch-keyed-noise"], count=1)
    among, _ = run(BROKEN["batch-keyed-noise"], count=8)
    assert not same(alone, among[:1])


def test_uniforms_of_24_bits_never_hit_every_second_token_of_the_tail():  # fault A13
    law_V = tail().table[0, 0].double().softmax(0).numpy()
    verifier = BROKEN["uniforms-24"].build(tail()).verify
    row = VerifyRow("r", Spec(SamplingParams()), 0, as_tokens([0]), as_tokens([]), as_tokens([]), as_tokens([]))
    uniforms = {verifier.uniform(0, row, position, "draw", 0) for position in range(200)}
    assert all((u * 2**24).is_integer() for u in uniforms)
    cumulative_V = law_V.cumsum()
    grid = np.arange(2**24 - 2**12, 2**24) * 2.0**-24
    hit = np.unique(cumulative_V.searchsorted(grid * cumulative_V[-1], side="right"))
    assert 4090 <= len(hit[hit > 0]) <= 4097
    assert set(np.diff(hit[hit > 0]).tolist()) == {2}


# Log-probabilities


def speculative_logprobs(name):
    """Rollouts with speculation, and the laws of their tokens: processed and raw log-probabilities."""
    target = BROKEN[name]
    rollouts, engine = run(target)
    expected = []
    for rollout in rollouts:
        raw_TV = engine.policy.logits_along(rollout.prompt, rollout.tokens)
        laws = [(raw_TV / target.params.temperature).log_softmax(-1), raw_TV.log_softmax(-1)]
        expected.append([law[range(len(rollout.tokens)), rollout.tokens.tolist()].numpy() for law in laws])
    assert engine.stats().tokens_accepted > 0
    return rollouts, expected


def test_accepted_tokens_have_log_probability_0():  # fault B1
    rollouts, expected = speculative_logprobs("zero-for-accepted")
    for rollout, (processed, _) in zip(rollouts, expected, strict=True):
        accepted = rollout.sources > 0
        assert (rollout.logprobs[accepted] == 0).all()
        assert np.allclose(rollout.logprobs[~accepted], processed[~accepted])


def test_asking_for_raw_log_probabilities_stops_the_drafts_and_nothing_says_so():  # fault B3
    _, engine = run(BROKEN["silently-plain"])
    assert engine.stats().tokens_drafted == 0
    assert engine.stats().events == {}
    _, right = run(BROKEN["zero-for-accepted"])
    assert right.stats().tokens_drafted > 0


def test_raw_log_probabilities_are_those_of_the_processed_law():  # fault B4
    rollouts, expected = speculative_logprobs("processed-in-place")
    assert all(np.allclose(r.raw_logprobs, processed) for r, (processed, _) in zip(rollouts, expected, strict=True))
    assert not any(np.allclose(r.raw_logprobs, raw) for r, (_, raw) in zip(rollouts, expected, strict=True))


def test_only_the_first_token_of_a_run_has_a_log_probability():  # fault B7
    rollouts, _ = speculative_logprobs("first-of-run")
    assert all(len(rollout.logprobs) == rollout.forwards for rollout in rollouts)
    assert any(len(rollout.logprobs) < len(rollout.tokens) for rollout in rollouts)


def test_raw_values_go_by_the_name_of_processed_ones():  # fault B8
    rollouts, expected = speculative_logprobs("wrong-mode")
    for rollout, (processed, raw) in zip(rollouts, expected, strict=True):
        assert rollout.logprob_mode == "processed"
        assert np.allclose(rollout.logprobs, raw)
        assert not np.allclose(rollout.logprobs, processed)


def test_the_mode_differs_with_speculation_on_and_off():  # fault B9
    target = BROKEN["raw-where-accepted"]
    (on, _), (off, _) = run(target), run(target, speculate=False)
    assert same(on, off)
    differ = [not np.allclose(a.logprobs, b.logprobs) for a, b in zip(on, off, strict=True)]
    assert differ == [a.accepted > 0 for a in on]


# Stops and lengths


SAYS = [10, 11, 12, 20, 21, 22, 23, 24, 25, 26]


def scripted(name, stop=None, k=9, **fields) -> Rollout:
    """The response of an engine whose policy says exactly ``SAYS``, ``k`` tokens of which are drafted a pass."""
    table = torch.full((32, 32, 32), -1e9, dtype=torch.float64)
    table[:, [1, *SAYS[:-1]], SAYS] = 0.0
    engine = BROKEN[name].build(ToyPolicy("scripted", table, () if stop is None else (stop,)))
    engine.drafter = ScriptedDrafter(lambda request, response: (SAYS[len(response) : len(response) + k], None))
    request = RolloutRequest(request_id="r", prompt=as_tokens([1]), params=SamplingParams(**fields))
    return engine.generate([request])[0]


def test_a_length_cap_hides_a_stop():  # fault C1
    rollout = scripted("cap-hides-stop", stop=12, max_tokens=5)
    assert (rollout.tokens.tolist(), rollout.finish_reason) == (SAYS[:5], "length")


def test_tokens_and_log_probabilities_past_the_stop_leak():  # fault C3
    rollout = scripted("leaks-past-stop", stop=12, k=4, max_tokens=10)
    assert (rollout.tokens.tolist(), rollout.finish_reason) == (SAYS[:5], "stop")
    assert len(rollout.logprobs) == 5


def test_a_stop_inside_a_draft_does_not_stop():  # fault C4
    assert scripted("last-token-only", stop=11, k=3, max_tokens=7).tokens.tolist() == SAYS[:7]
    assert scripted("last-token-only", stop=20, k=3, max_tokens=7).finish_reason == "stop"


def test_one_token_more_or_fewer_than_the_most():  # fault C5
    assert scripted("one-more", k=5, max_tokens=7).tokens.tolist() == SAYS[:8]
    assert scripted("one-fewer", k=3, max_tokens=7).tokens.tolist() == SAYS[:6]


def test_more_tokens_are_counted_as_accepted_than_were_emitted():  # fault C9
    rollout = scripted("counts-beyond-end", stop=11, k=5, max_tokens=9)
    assert (len(rollout.tokens), rollout.accepted) == (2, 5)


def test_an_empty_draft_is_an_error():  # fault C10
    with pytest.raises(IndexError):
        run(BROKEN["empty-draft-fails"])


def test_with_speculation_the_context_ends_a_draft_and_a_token_early():  # fault C11
    target = BROKEN["cuts-early"]
    on, off = (
        max(len(rollout.tokens) for rollout in run(target, speculate=speculate)[0]) for speculate in (True, False)
    )
    assert off == 16 - 2
    assert on == off - (4 + 1)


# Processors


def laws(name, tokens, response=(), **fields) -> np.ndarray:
    """What a verifier takes for the laws at the root and along a drafted chain, on logits (2, 1, 0)."""
    verifier = BROKEN[name].build(falling_logits()).verify if isinstance(name, str) else name
    spec, prompt = Spec(SamplingParams(**fields)), as_tokens([2])
    row = VerifyRow("r", spec, 0, prompt, as_tokens(response), as_tokens(tokens), chain_parents(len(tokens)))
    return verifier.laws(torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64).expand(1 + len(tokens), -1), [row])


def test_a_penalty_does_not_see_the_drafted_tokens_before_its_position():  # fault D1
    for node in laws("prefix-of-pass", [0, 0], repetition_penalty=2.0):
        assert np.allclose(node, (0.665241, 0.244728, 0.090031), atol=1e-6)
    right = laws("fresh-sample", [0, 0], repetition_penalty=2.0)
    assert np.allclose(right[1], (0.422319, 0.422319, 0.155362), atol=1e-6)


def test_what_follows_a_drafted_token_was_drawn_without_its_penalty():  # fault D1
    rollouts, _ = run(BROKEN["prefix-of-pass"], count=1500, max_tokens=3, depth=2)
    second = np.array([rollout.tokens[1] for rollout in rollouts if rollout.tokens[0] == 0 and rollout.sources[0]])
    assert total_variation(second, (0.665241, 0.244728, 0.090031)) < 0.05
    assert total_variation(second, (0.422319, 0.422319, 0.155362)) > 0.15


def test_a_repetition_penalty_of_0_is_taken():  # fault D2
    assert BROKEN["zero-penalty"].make_params(repetition_penalty=0.0, top_k=2).repetition_penalty == 0
    with pytest.raises(ValueError, match="repetition_penalty"):
        BROKEN["fresh-sample"].make_params(repetition_penalty=0.0)


def test_a_rejected_draft_leaves_its_traces():  # fault D5
    verifier = BROKEN["state-keeps-rejected"].build(falling_logits()).verify
    fresh = laws(verifier, [], frequency_penalty=1.0)
    logits = torch.tensor([[2.0, 1.0, -1e9]], dtype=torch.float64).expand(2, -1)
    spec = Spec(SamplingParams(frequency_penalty=1.0))
    row = VerifyRow("r", spec, 0, as_tokens([2]), as_tokens([]), as_tokens([2]), chain_parents(1))
    (verdict,) = verifier(logits, [row], 0)
    assert len(verdict.path) == 0
    assert not np.allclose(laws(verifier, [], frequency_penalty=1.0), fresh)


def test_stop_strings_without_a_tokenizer_are_dropped():  # fault D6
    target = BROKEN["stop-strings-ignored"]
    rollouts, _ = run(target)
    assert len(rollouts) == 40
    with pytest.raises(RequestError, match="stop strings"):
        CONTROLS["paceline"].build(markov()).submit(
            [RolloutRequest(request_id="r", prompt=as_tokens([1]), params=target.params)]
        )


# The registry

ROWS = "A1 A2 A3 A4 A6 A7 A8 A9 A10 A11 A12 A13 A15 B1 B3 B4 B7 B8 B9 C1 C3 C4 C5 C9 C10 C11 D1 D2 D5 D6"


def test_every_fault_of_an_engine_has_its_broken_one():
    assert {target.row for target in BROKEN.values()} == set(ROWS.split())
    assert {target.base for target in BROKEN.values()} <= set(CONTROLS)
    kinds = {"law", "noise", "logprobs", "ends", "counters", "errors", "silent"}
    assert {target.kind for target in BROKEN.values()} == kinds


@pytest.mark.parametrize("name", [name for name, target in BROKEN.items() if target.kind in ("logprobs", "counters")])
def test_what_is_recorded_wrongly_was_still_sampled_rightly(name):
    target = BROKEN[name]
    assert same(run(target)[0], run(target, speculate=False)[0])
