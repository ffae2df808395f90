"""What a grammar allows after a prefix, and that it forgets every draft that was rejected."""

import json
import random
import sys

import numpy as np
import pytest
import torch

from paceline.sampling import grammar as module
from paceline.sampling.grammar import GrammarError, Vocabulary
from paceline.sampling.processors import Spec, process
from paceline.schema import Grammar, SamplingParams, as_tokens
from tiny_policies import BOS, EOS, byte_tokenizer
from toys import generate

TOKENIZER = byte_tokenizer()
WORDS = Vocabulary(TOKENIZER)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"const": "area"}, "base": {"type": "integer"}, "unit": {"enum": ["cm", "m"]}},
    "required": ["name", "base"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar(kind="json_schema", text=json.dumps(SCHEMA)),
    Grammar(kind="json_schema", text=json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})),
    Grammar(kind="regex", text="(foo|bar|foobar)*[0-9]{2,4} end"),
    Grammar(kind="ebnf", text='start: (WORD " ")+ "stop" ("ped" | "page")?\nWORD: /[a-z]{2,6}/'),
]


def ids(text):
    return as_tokens(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def letters(matcher, text):
    """The bytes that may follow ``text``, and whether it may end there."""
    allowed = matcher.allowed(ids(text))
    return "".join(sorted(TOKENIZER.decode([i]) for i in np.flatnonzero(allowed.is_allowed_V))), allowed.may_end


def babble(seed):
    """A policy that speaks bytes; what it says next depends on the last one."""
    table = 3 * torch.randn(16, 258, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return lambda prompt, response: table[int(np.concatenate([prompt, response])[-1]) % 16]


def regex(text, **more):
    return Grammar(kind="regex", text=text, **more)


def walk(matcher, rng, most=30):
    """A random response that the grammar allows."""
    response = []
    while len(response) < most:
        open_ids = np.flatnonzero(matcher.allowed(as_tokens(response)).is_allowed_V)
        if not len(open_ids):
            break
        response.append(int(rng.choice(list(open_ids))))
    return response


def test_a_regex_a_schema_and_an_ebnf_allow_what_they_say():
    matcher = WORDS.matcher(regex("ab?[0-9]{1,2}"))
    assert letters(matcher, "") == ("a", False)
    assert letters(matcher, "a") == ("0123456789b", False)
    assert letters(matcher, "ab1") == ("0123456789", True)
    assert letters(matcher, "ab12") == ("", True)
    schema = WORDS.matcher(GRAMMARS[1])
    assert letters(schema, '{"name":"area","base":1') == (",0123456789}", False)
    assert letters(schema, '{"name":"area","base":1}') == ("", True)
    words = WORDS.matcher(GRAMMARS[3])
    assert letters(words, "to stop") == (" abcdefghijklmnopqrstuvwxyz", True)


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_the_answer_is_a_function_of_the_prefix_in_whatever_order_it_is_asked(grammar):
    rng = random.Random(1)
    asked = WORDS.matcher(grammar)
    paths = [walk(asked, rng) for _ in range(6)]
    prefixes = [path[:cut] for path in paths for cut in range(len(path) + 1)]
    rng.shuffle(prefixes)
    for prefix in prefixes:
        if rng.random() < 0.3:  # a token that is forbidden, and two after it
            asked.allowed(as_tokens([*prefix, BOS, 3, 4]))
        fresh, ours = WORDS.matcher(grammar).allowed(as_tokens(prefix)), asked.allowed(as_tokens(prefix))
        assert np.array_equal(fresh.is_allowed_V, ours.is_allowed_V)
        assert fresh.may_end == ours.may_end


def test_after_a_rejected_draft_the_state_is_that_of_before():  # field H1
    matcher, committed = WORDS.matcher(GRAMMARS[1]), ids('{"name":"area","ba')
    before, forced = matcher.allowed(committed), matcher.forced(committed)
    for wrong in ('se":12}', 'se":7,"unit":"c', "XX", "s"):
        matcher.allowed(np.concatenate([committed, ids(wrong)]))
    after = matcher.allowed(committed)
    assert np.array_equal(before.is_allowed_V, after.is_allowed_V)
    assert before.may_end == after.may_end
    assert matcher.forced(committed) == forced == ids('se":').tolist()


def test_a_forced_token_is_the_only_one_allowed():
    rng = random.Random(2)
    for grammar in GRAMMARS:
        matcher = WORDS.matcher(grammar)
        path = walk(matcher, rng)
        for cut in range(len(path)):
            prefix = path[:cut]
            for token in matcher.forced(as_tokens(prefix)):
                assert np.flatnonzero(matcher.allowed(as_tokens(prefix)).is_allowed_V).tolist() == [token]
                prefix = [*prefix, token]


def test_a_trigger_starts_the_grammar_right_after_its_first_occurrence():  # field H1
    matcher = WORDS.matcher(regex("[0-9]+", trigger=tuple(ids("<<").tolist())))
    for silent in ("", "12a", "<", "a<b<"):
        assert matcher.allowed(ids(silent)) is None
        assert matcher.permits(ids(silent))
        assert matcher.forced(ids(silent)) == []
    assert letters(matcher, "so <<") == ("0123456789", False)
    assert letters(matcher, "<<1") == ("0123456789", True)
    assert matcher.allowed(ids("<<1<<2")) is None, "the second one is a token that the grammar forbids"
    assert not matcher.permits(ids("<<1<<2"))


def law(text, spec, size=258):
    out = process(torch.zeros(1, size, dtype=torch.float64), [spec], lambda n: (as_tokens([0]), ids(text)))
    return set(np.flatnonzero(out.isfinite()[0].numpy()).tolist())


def spec(grammar, stop_ids=(EOS,), **params):
    return Spec(SamplingParams(grammar=grammar, **params), stop_ids, WORDS.matcher(grammar))


def test_every_stop_id_is_allowed_exactly_where_the_grammar_may_end():
    own_stop = int(ids("!")[0])
    two = spec(regex("ab?"), (EOS, own_stop))
    assert law("", two) == {int(ids("a")[0])}
    assert law("a", two) == {int(ids("b")[0]), EOS, own_stop}
    assert law("ab", two) == {EOS, own_stop}


def test_an_end_token_that_is_no_stop_id_is_not_allowed():
    own_stop = int(ids("!")[0])
    assert law("a", spec(regex("a"), (own_stop,))) == {own_stop}


def test_a_policy_may_know_more_ids_than_the_tokenizer_and_fewer():
    assert law("a", spec(regex("ab?"), (EOS,)), size=300) == {int(ids("b")[0]), EOS}
    first = min(int(ids(c)[0]) for c in "ab")
    assert law("", spec(regex("[ab]"), (0,)), size=first + 1) == {first}


def test_after_a_token_that_ends_the_response_nothing_is_masked():
    constrained = spec(regex("a"))
    out = process(torch.zeros(1, 258), [constrained], lambda n: (as_tokens([0]), as_tokens([*ids("a").tolist(), EOS])))
    assert out.isfinite().all()


def test_other_processors_apply_beside_the_grammar():
    assert law("a", spec(regex("a(b|c)?"), bad_words=((int(ids("b")[0]),),), min_tokens=2)) == {int(ids("c")[0])}


@pytest.mark.parametrize("seed", range(6))
def test_drafts_change_no_token_under_a_grammar(seed):  # field H1
    policy = babble(seed)
    grammar = regex("x[0-9]{2,9}(foo|bar)y+", trigger=tuple(ids("z").tolist())[: seed % 2])
    params = SamplingParams(grammar=grammar, max_tokens=24)
    rng = np.random.default_rng(seed)

    def decode(propose=None):
        return generate(
            policy, params, seed=seed, propose=propose, stop_ids=(EOS,), matcher=WORDS.matcher(grammar), run_seed=5
        )

    plain = decode()

    def propose(done):
        right, tokens, parents, at = plain.tokens[len(done) : len(done) + 5], [], [], -1
        for token in right:
            tokens += [int(rng.integers(0, 258)), token]
            parents += [at, at]
            at = len(tokens) - 1
        return tokens, parents

    drafted = decode(propose)
    assert drafted.tokens == plain.tokens
    assert drafted.processed == plain.processed
    assert drafted.forwards < plain.forwards
    if not grammar.trigger:
        assert TOKENIZER.decode(plain.tokens).startswith("x")


# What is refused


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (regex("[a-"), "the regex does not compile: .*unclosed character class"),
        (Grammar(kind="json_schema", text="{"), "the json_schema does not compile: expected"),
        (Grammar(kind="json_schema", text='{"type": "integr"}'), "the json_schema does not compile: Invalid type"),
        (Grammar(kind="ebnf", text="start: x"), 'the ebnf does not compile: .*unknown name: "x"'),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused_in_one_line(grammar, reason):
    with pytest.raises(GrammarError, match=reason) as refused:
        WORDS.matcher(grammar)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("bad", [{"text": " "}, {"text": "a", "trigger": (-1,)}])
def test_impossible_values_are_refused_at_construction(bad):
    with pytest.raises(ValueError, match=list(bad)[-1]):
        Grammar(kind="regex", **bad)


def test_a_grammar_without_a_matcher_is_never_ignored():  # field D6
    with pytest.raises(ValueError, match="no matcher"):
        Spec(SamplingParams(grammar=regex("a")), (EOS,))


def test_without_llguidance_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r"pip install 'paceline\[grammar\]'"):
        Vocabulary(TOKENIZER).matcher(regex("a"))


def test_a_tokenizer_of_unknown_bytes_is_refused():
    with pytest.raises(GrammarError, match="fast tokenizer"):
        Vocabulary(object()).matcher(regex("a"))


def test_the_last_used_grammars_stay_compiled_and_no_more():
    few = Vocabulary(TOKENIZER, most=2)
    for text in ("a", "b", "a", "c"):
        few.matcher(regex(text))
    assert {text for _, text in few._compiled} == {"a", "c"}


def test_a_grammar_that_grows_too_complex_is_named_and_the_matcher_goes_on(monkeypatch):
    matcher = WORDS.matcher(regex("ab"))
    broken = type("Broken", (), {"is_error": lambda self: True, "get_error": lambda self: "too\ncomplex"})()
    broken.try_consume_tokens = lambda tokens: 0
    matcher._state = broken
    with pytest.raises(GrammarError, match="too complex"):
        matcher.allowed(ids("a"))
    assert letters(matcher, "a") == ("b", False)


def test_the_module_needs_no_torch():
    assert "torch" not in vars(module)
