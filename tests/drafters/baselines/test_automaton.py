"""The suffix automaton holds the counts of a suffix tree: checked against counting in the plain sequences."""

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters.baselines.automaton import SuffixAutomaton

LETTERS = st.integers(0, 2)
#: Appends (name, tokens), and drops where there are no tokens.
EVENTS = st.lists(st.tuples(st.integers(0, 3), st.lists(LETTERS, max_size=9)), max_size=14)


def play(events):
    """The automaton and the plain sequences after a history of appends and drops."""
    held, plain = SuffixAutomaton(), {}
    for name, tokens in events:
        if tokens:
            held.append(name, tokens)
            plain[name] = plain.get(name, []) + tokens
        elif name in held:
            held.drop(name)
            del plain[name]
    return held, plain


def count(plain, string):
    return sum(s[i : i + len(string)] == string for s in plain.values() for i in range(len(s) - len(string) + 1))


@settings(max_examples=300, deadline=None)
@given(EVENTS, st.lists(LETTERS, min_size=1, max_size=7))
def test_every_suffix_of_a_context_has_its_true_count_and_children(events, context):
    held, plain = play(events)
    states = {
        length: state for state, shortest, longest in held.matches(context) for length in range(shortest, longest + 1)
    }
    for length in range(1, len(context) + 1):
        suffix = context[-length:]
        assert (length in states) is (count(plain, suffix) > 0)
        if length in states:
            assert held.counts[states[length]] == count(plain, suffix)
            followers = {token: held.counts[child] for token, child in held.children(states[length])}
            assert followers == {t: n for t in range(3) if (n := count(plain, [*suffix, t]))}


@settings(max_examples=100, deadline=None)
@given(EVENTS)
def test_the_newest_continuation_is_copied_from_the_newest_occurrence(events):
    held, plain = play([(number, tokens) for number, (_, tokens) in enumerate(events) if tokens])
    for context in ([0], [1, 0], [2, 1]):
        ends = [
            tokens[i + len(context) :]
            for tokens in plain.values()
            for i in range(len(tokens) - len(context))
            if tokens[i : i + len(context)] == context
        ]
        if ends:
            (state, _, longest), *_ = held.matches(context)
            assert longest == len(context)
            copied = held.newest_continuation(state, 20)
            assert copied[: len(ends[-1])] == ends[-1]


def test_what_is_dropped_is_given_back():
    held = SuffixAutomaton()
    for number in range(200):
        held.append(number, [number, number + 1, 7] * 5)
        if number >= 4:
            held.drop(number - 4)
    small = SuffixAutomaton()
    for number in range(196, 200):
        small.append(number, [number, number + 1, 7] * 5)
    assert held.names == small.names
    assert held.nbytes < 4 * small.nbytes


def test_the_owner_is_who_said_it_last():
    held = SuffixAutomaton()
    held.append("a", [1, 2])
    held.append("b", [1, 3])
    (state, _, _), *_ = held.matches([1])
    assert held.owner(state) == "b"
    assert {token: held.owner(child) for token, child in held.children(state)} == {2: "a", 3: "b"}
