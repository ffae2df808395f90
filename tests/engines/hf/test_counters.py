"""What the engine counts is what was emitted: every counter equals a count from the tokens and the drafts alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import BudgetConfig, EngineConfig, SentinelConfig
from paceline.engines.hf import HFEngine
from paceline.schema import SOURCES, RolloutRequest, SamplingParams, as_tokens, reaching
from scripted import ScriptedDrafter
from tiny_models import VOCABULARY, tiny

MODEL = tiny(context=40)
CONTEXT, PROMPT, LONG = 40, (3, 4, 5), 14
NAMES = ("a", "b", "c")


def letters(tokens):
    return "".join(chr(97 + token % 26) for token in tokens)


def engine(drafter=None, eos_ids=()):
    return HFEngine(
        MODEL, drafter=drafter, eos_ids=eos_ids, decode=letters, budget=24, budget_config=BudgetConfig(mode="fixed"),
        config=EngineConfig(self_check=False, sentinel=SentinelConfig(canaries=0, checksums=False)),
    )  # fmt: skip


def asked(name, **params):
    params = {"max_tokens": LONG, "seed": NAMES.index(name), **params}
    return RolloutRequest(request_id=name, prompt=as_tokens(PROMPT), params=SamplingParams(**params))


#: What the policy says to each request where nothing ends it early.
SAID = {r.request_id: r.tokens.tolist() for r in engine().generate([asked(name) for name in NAMES])}


class Hidden(ScriptedDrafter):
    """Trees that hide the right continuation among others, no two siblings alike, with a source for each node."""

    def __init__(self, seed, said):
        super().__init__(self.tree)
        self.said = said
        self.rng = np.random.default_rng(seed)
        self.drafts = {}

    def propose(self, request_ids, budget):
        found = super().propose(request_ids, budget)
        for draft in found:
            draft.sources = self.rng.integers(1, len(SOURCES), len(draft.tokens)).astype(np.uint8)
            at = draft.length - len(PROMPT)
            nodes = zip(draft.tokens.tolist(), draft.parents.tolist(), draft.sources.tolist(), strict=True)
            self.drafts[draft.request_id, at] = list(nodes)
        return found

    def tree(self, request, response):
        tokens, parents, at = [], [], -1
        right = self.said[request.request_id][len(response) : len(response) + int(self.rng.integers(0, 7))]

        def grow(token, parent):
            if (token, parent) not in zip(tokens, parents, strict=True):
                tokens.append(token)
                parents.append(parent)
                return len(tokens) - 1
            return list(zip(tokens, parents, strict=True)).index((token, parent))

        for token in right:
            for _ in range(int(self.rng.integers(0, 2))):
                grow(int(self.rng.integers(0, VOCABULARY)), int(self.rng.integers(-1, len(tokens))) if tokens else -1)
            at = grow(token, at)
        for _ in range(int(self.rng.integers(0, 3))):  # below the last right one
            grow(int(self.rng.integers(0, VOCABULARY)), at)
        return as_tokens(tokens), parents


def counted(tokens, drafts, longest):
    """A response's passes, one after another: (emitted, accepted, tested, drafted, sources of the emitted) of each."""
    passes, at = [], 0
    while at < len(tokens):
        room = min(longest, CONTEXT - len(PROMPT)) - at
        depth, nodes = {-1: 0}, {}
        for index, (token, parent, source) in enumerate(drafts.get(at, ())):
            depth[index] = depth[parent] + 1
            if depth[index] < room:  # a pass emits one token more than it accepts
                nodes[index] = token, parent, source
        node, sources = -1, []
        for token in tokens[at:]:
            child = [index for index, (drafted, parent, _) in nodes.items() if (drafted, parent) == (token, node)]
            if not child:
                break
            (node,) = child
            sources.append(nodes[node][2])
        accepted = len(sources)
        goes_on = at + accepted < len(tokens)  # then the policy said a token of its own behind the last accepted one
        is_tested = goes_on and any(parent == node for _, parent, _ in nodes.values())
        passes.append((accepted + goes_on, accepted, accepted + is_tested, len(nodes), sources + [0] * goes_on))
        at += accepted + goes_on
    return passes


@st.composite
def endings(draw):
    """Parameters that end a response somewhere inside what the policy says."""
    name = draw(st.sampled_from(NAMES))
    at = draw(st.integers(0, LONG - 1))
    kind = draw(st.sampled_from(["length", "stop_token_ids", "stop", "none"]))
    params = {"length": {"max_tokens": at + 1}, "stop_token_ids": {"stop_token_ids": (SAID[name][at],)},
              "stop": {"stop": (letters(SAID[name][max(0, at - 1) : at + 1]),)}, "none": {}}[kind]  # fmt: skip
    return params | {"min_tokens": min(draw(st.sampled_from([0, 0, 5])), params.get("max_tokens", LONG))}


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1 << 16),
    ends=st.tuples(endings(), endings(), endings()),
    eos=st.none() | st.integers(0, LONG - 1),
    aborts=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 5), max_size=2),
)
def test_every_counter_is_the_count_from_tokens_and_drafts(seed, ends, eos, aborts):
    eos_ids = () if eos is None else (SAID["a"][eos],)
    requests = [asked(name, **params) for name, params in zip(NAMES, ends, strict=True)]
    plain = {rollout.request_id: rollout.tokens.tolist() for rollout in engine(eos_ids=eos_ids).generate(requests)}
    # Drafts go on behind the end, with what the policy would say there.
    drafter = Hidden(seed, {name: tokens + SAID[name][len(tokens) :] for name, tokens in plain.items()})
    spec = engine(drafter, eos_ids)
    spec.submit(requests)
    rollouts, step = {}, 0
    while spec.busy:
        in_flight = set(NAMES) - set(rollouts)
        for name in sorted(in_flight):
            if aborts.get(name) == step:
                spec.abort(name)
        rollouts |= {rollout.request_id: rollout for rollout in spec.step()}
        step += 1
    assert rollouts.keys() == set(NAMES)

    every = []
    for request in requests:
        name, longest = request.request_id, request.params.max_tokens
        rollout = rollouts[name]
        assert rollout.tokens.tolist() == plain[name][: len(rollout.tokens)]
        assert rollout.finish_reason == "abort" or len(rollout.tokens) == len(plain[name])
        drafts = {at: nodes for (of, at), nodes in drafter.drafts.items() if of == name}
        passes = counted(rollout.tokens.tolist(), drafts, longest)
        every += passes
        emitted, accepted, _, drafted, sources = zip(*passes, strict=True) if passes else [()] * 5
        assert rollout.forwards == len(passes)
        assert rollout.accept_lengths.tolist() == list(accepted)
        assert (rollout.accepted, rollout.drafted) == (sum(accepted), sum(drafted))
        assert rollout.sources.tolist() == [source for part in sources for source in part]
        outcomes = [outcome for outcome in drafter.outcomes if outcome.request_id == name]
        assert [len(o.tokens) for o in outcomes] == list(emitted)
        assert [(o.accepted, o.drafted) for o in outcomes] == list(zip(accepted, drafted, strict=True))
        assert [token for o in outcomes for token in o.tokens] == rollout.tokens.tolist()
        assert [o.finished for o in outcomes].count(True) == (rollout.finish_reason != "abort")
    stats = spec.stats()
    emitted, accepted, tested, drafted, _ = zip(*every, strict=True) if every else [()] * 5
    assert stats.tokens_emitted == sum(emitted) == sum(len(rollout.tokens) for rollout in rollouts.values())
    assert (stats.row_forwards, stats.tokens_accepted, stats.tokens_drafted) == (
        len(every), sum(accepted), sum(drafted),
    )  # fmt: skip
    assert stats.depths_accepted == reaching(accepted)
    assert stats.depths_tested == reaching(tested)
    spec.close()
