"""Forced tokens are drafted for free, below and around the drafts of another drafter."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from driving import begin, say
from paceline.config import BudgetConfig, ConfigError, DrafterConfig, HistoryConfig, load_config
from paceline.drafters import ForcedDrafter, HistoryDrafter, PrefetchingDrafter, history_of, make_drafter
from paceline.drafters.base import Prefetcher
from paceline.engines.hf import HFEngine
from paceline.sampling.grammar import Vocabulary
from paceline.schema import SOURCES, Draft, Grammar, PacelineError, RolloutRequest, SamplingParams, as_tokens
from scripted import ScriptedDrafter, mixed_trees, random_trees
from tiny_policies import EOS, VOCABULARY, byte_tokenizer, tiny_config

TOKENIZER = byte_tokenizer()
WORDS = Vocabulary(TOKENIZER)


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def text(tokens):
    return TOKENIZER.decode(tokens)


def request(grammar="ab(cd|xyz)end", name="r", trigger=(), **params):
    grammar = None if grammar is None else Grammar(kind="regex", text=grammar, trigger=trigger)
    params = SamplingParams(grammar=grammar, **params)
    return RolloutRequest(request_id=name, prompt=as_tokens(ids("ask")), params=params)


def drafter(script=None, *requests):
    forced = ForcedDrafter(None if script is None else ScriptedDrafter(script), WORDS)
    forced.start(requests or [request()])
    return forced


def paths(draft):
    """The texts of the leaves."""
    parents = range(-1, len(draft.tokens) - 1) if draft.parents is None else draft.parents.tolist()
    found = []
    for leaf in set(range(len(draft.tokens))) - set(parents):
        path, at = [], leaf
        while at >= 0:
            path.append(int(draft.tokens[at]))
            at = parents[at]
        found.append(text(path[::-1]))
    return sorted(found)


def fixed(words, at=""):
    """A script that drafts a tree of words whatever was said; all below ``at``."""

    def script(request, response):
        tokens, parents = [], []
        for word in words:
            above = -1
            for token in ids(at + word):
                held = [i for i, (t, p) in enumerate(zip(tokens, parents, strict=True)) if (t, p) == (token, above)]
                if not held:
                    tokens.append(token)
                    parents.append(above)
                above = held[0] if held else len(tokens) - 1
        return as_tokens(tokens), parents

    return script


def test_what_is_forced_is_drafted_without_any_other_drafter():
    forced = drafter()
    (draft,) = forced.propose(["r"], 16)
    assert (text(draft.tokens), draft.length, draft.parents) == ("ab", 3, None)
    assert {SOURCES[source] for source in draft.sources} == {"forced"}
    assert (draft.probs > 0.99).all()
    say(forced, "r", ids("ab"))
    assert forced.propose(["r"], 16) == [], "two ways lead on"
    say(forced, "r", ids("x"))
    (draft,) = forced.propose(["r"], 16)
    assert (text(draft.tokens), draft.length) == ("yzend", 6)
    (draft,) = forced.propose(["r"], 2)
    assert text(draft.tokens) == "yz"


def test_the_inner_draft_goes_on_below_what_is_forced_and_forced_tokens_below_it():
    (draft,) = drafter(fixed(["abx", "abc"])).propose(["r"], 16)
    assert paths(draft) == ["abcdend", "abxyzend"]
    assert [SOURCES[s] for s in draft.sources[:2]] == ["forced", "forced"]
    assert "other" in {SOURCES[s] for s in draft.sources}


def test_what_the_grammar_forbids_is_cut_off_with_all_below_it():
    (draft,) = drafter(fixed(["abq", "zz", "abx?"])).propose(["r"], 16)
    assert paths(draft) == ["abxyzend"]


def test_an_inner_draft_that_disagrees_gives_way_to_what_is_forced():
    (draft,) = drafter(fixed(["other words"])).propose(["r"], 16)
    assert paths(draft) == ["ab"]


class Claiming:
    """Drafts the words below "ab" with the probabilities that they are given."""

    def __init__(self, probs, **more):
        self.probs, self.more = probs, more

    def start(self, requests):
        pass

    def propose(self, request_ids, budget):
        tokens, parents = fixed(["c", "x"], at="ab")(None, None)
        probs = np.array(self.probs, dtype=np.float32)
        return [Draft(request_id="r", tokens=tokens, parents=as_tokens(parents), probs=probs, length=3, **self.more)]


def test_probabilities_stay_path_probabilities_that_never_grow():
    forced = ForcedDrafter(Claiming([0.5, 0.4, 0.1, 0.3]), WORDS)
    forced.start([request()])
    (draft,) = forced.propose(["r"], 16)
    of_path = {}
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        above = of_path[parent][0] if parent >= 0 else ""
        of_path[node] = (above + text([token]), draft.probs[node])
        assert parent < 0 or draft.probs[node] <= of_path[parent][1]
    probs = dict(of_path.values())
    # The inner shares below "ab" are .1 / .4 and .3 / .4; the rest is forced.
    assert np.allclose([probs["ab"], probs["abc"], probs["abx"], probs["abxyzend"]], [1, 0.25, 0.75, 0.75], atol=0.02)
    (draft,) = forced.propose(["r"], 4)
    assert paths(draft) == ["abxy"], "the likelier branch gets what the budget allows"


def test_a_draft_that_was_drawn_from_a_law_is_never_picked_from():
    forced = ForcedDrafter(Claiming([1, 1, 1, 1], laws="laws", law_of=as_tokens([0, 1, 2, 2])), WORDS)
    forced.start([request("[a-z]+")])
    (draft,) = forced.propose(["r"], 16)
    assert (draft.laws, paths(draft)) == ("laws", ["abc", "abx"])
    forced.start([request()])
    (draft,) = forced.propose(["r"], 16)
    assert (draft.laws, paths(draft)) == (None, ["ab"]), "what is forced depends on the committed tokens alone"


def test_nothing_is_forced_before_the_trigger_and_all_of_it_behind_one_in_the_draft():
    constrained = request(trigger=tuple(ids("!")))
    assert drafter(None, constrained).propose(["r"], 16) == []
    (draft,) = drafter(fixed(["so!q", "no"]), constrained).propose(["r"], 16)
    assert paths(draft) == ["no", "so!ab"]


def test_requests_without_a_grammar_get_the_inner_draft_as_it_is():
    inner = ScriptedDrafter(fixed(["abq"]))
    forced = ForcedDrafter(inner, WORDS)
    forced.start([request(None, "free"), request(name="bound")])
    free, bound = sorted(forced.propose(["free", "bound"], 16), key=lambda draft: draft.request_id != "free")
    assert (paths(free), paths(bound)) == (["abq"], ["ab"])
    assert free.sources is None


def test_the_inner_drafter_hears_of_everything():
    inner = HistoryDrafter(salt=0)
    forced = ForcedDrafter(inner, WORDS)
    forced.on_weights(3)
    begin(forced, "free")
    say(forced, "free", ids("ab"))
    assert inner.tokens_held > 0
    assert inner._version == 3


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("inner", ["none", "history", "trees"])
def test_forced_drafts_change_no_token_and_save_passes(model, inner, temperature):
    schema = {
        "type": "object",
        "properties": {"name": {"const": "area"}, "unit": {"enum": ["centimetre", "metre", "mile"]}},
        "required": ["name", "unit"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    reqs = [
        RolloutRequest(
            request_id=f"r{i}", prompt=as_tokens(ids(f"ask {i % 2}")), group=f"g{i % 2}",
            params=SamplingParams(max_tokens=48, grammar=grammar, temperature=temperature),
        )
        for i in range(4)
    ]  # fmt: skip

    def run(drafter):
        engine = HFEngine(model, drafter=drafter, budget_config=BudgetConfig(mode="fixed"), tokenizer=WORDS)
        try:
            return engine.generate(reqs), engine.stats()
        finally:
            engine.close()

    plain, plain_stats = run(None)
    scripts = {"none": None, "history": HistoryDrafter(salt=0), "trees": ScriptedDrafter(random_trees(1, VOCABULARY))}
    spec, stats = run(ForcedDrafter(scripts[inner], WORDS))
    assert [r.tokens.tolist() for r in spec] == [r.tokens.tolist() for r in plain]
    assert all(r.tokens[-1] == EOS for r in spec)
    assert stats.row_forwards * 4 < plain_stats.row_forwards
    assert any(SOURCES.index("forced") in r.sources for r in spec)
    assert stats.events == {}
    trees = ScriptedDrafter(mixed_trees(plain, 1, VOCABULARY))
    assert [r.tokens.tolist() for r in run(ForcedDrafter(trees, WORDS))[0]] == [r.tokens.tolist() for r in plain]


# Choosing it


def test_a_configured_drafter_is_wrapped_where_there_are_grammars():
    config = DrafterConfig()
    assert type(make_drafter(config)) is HistoryDrafter
    wrapped = make_drafter(config, salt=1, vocabulary=WORDS)
    assert type(wrapped) is ForcedDrafter
    assert history_of(wrapped) is wrapped.inner
    assert not isinstance(wrapped, Prefetcher)
    assert type(make_drafter(DrafterConfig(forced=False), vocabulary=WORDS)) is HistoryDrafter
    assert make_drafter(DrafterConfig(kind="none"), vocabulary=WORDS) is None
    alone = make_drafter(DrafterConfig(kind="forced"), vocabulary=WORDS)
    assert (alone.inner, history_of(alone), history_of(None)) == (None, None, None)


def test_prefetching_stays_possible_behind_it():
    config = DrafterConfig(history=HistoryConfig(prefetch=4))
    wrapped = make_drafter(config, vocabulary=WORDS)
    assert isinstance(wrapped, Prefetcher)
    assert isinstance(history_of(wrapped), PrefetchingDrafter)


def test_forced_alone_needs_a_grammar_and_itself():
    with pytest.raises(PacelineError, match="there is no grammar"):
        make_drafter(DrafterConfig(kind="forced"))
    with pytest.raises(ConfigError, match=r"drafter.forced: False must be true where kind is forced"):
        load_config(None, ["drafter.kind=forced", "drafter.forced=false"])
