"""Stop strings in a decoded tail: the same ends and texts as of the whole response, for every kind of tokenizer."""

import random
from os.path import commonprefix

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from paceline.audit.conduct import completed
from paceline.sampling.stops import Ending, Tail, cut
from paceline.schema import SamplingParams, as_tokens

MARK = "\ufffd"
WORDS = ("▁", "▁a", "a", "b", "▁the", "<", "/s>", "</", "s>", "中", "é", "▁▁", "\n")


def fast(model, decoder):
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<s>", "<e>"], clean_up_tokenization_spaces=False
    )
    return len(wrapped), lambda ids: wrapped.decode(ids, skip_special_tokens=True)


def byte_level():
    """Characters in parts, and tokens that end one character and begin the next."""
    letter = bytes_to_unicode()
    words = [bytes([at]) for at in range(256)]
    words += [text.encode() for text in ("the", " th", "ab", "</", "s>", "\n\n", "中", "é", " a")]
    words += [b"\xad\xe4", b"\xb8\xad\xe4", b"\xa9\xc3"]
    vocabulary = {"".join(letter[byte] for byte in word): at for at, word in enumerate(words)}
    return fast(models.BPE(vocabulary, []), decoders.ByteLevel())


def byte_fallback():
    """A run of bytes is text or, one wrong byte in it, none of it is."""
    words = [f"<0x{at:02X}>" for at in range(256)] + list(WORDS)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model = models.BPE({word: at for at, word in enumerate(words)}, [], byte_fallback=True)
    return fast(model, decoders.Sequence(parts))


def metaspace():
    return fast(models.BPE({word: at for at, word in enumerate(WORDS)}, []), decoders.Metaspace())


def wordpiece():
    words = ["[UNK]", "a", "##b", "##s", ".", "<", "/", "n", "'", "t", "do", "##a", "the", ">"]
    model = models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]")
    return fast(model, decoders.WordPiece("##"))


def plain_bytes():
    return 256, lambda ids: bytes(ids).decode("utf-8", "ignore")


KINDS = {make.__name__: make for make in (byte_level, byte_fallback, metaspace, wordpiece, plain_bytes)}


def reference(tokens, params, decode):
    """Where a response ends by its whole text, decoded at every token."""
    stood = ""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count])
        known = len(commonprefix([stood, text]))  # noqa: RUF071
        if count > params.min_tokens:
            found = [text.find(stop, max(0, known - len(stop) + 1)) for stop in params.stop]
            if any(at >= 0 for at in found):
                return count, text[: min(at for at in found if at >= 0)]
        whole = text.rstrip(MARK)
        if not (text.endswith(MARK) and stood.startswith(whole)):
            stood = whole
    return None


def ended(tokens, params, decode, rng):
    """The same, by runs of tokens as passes emit them."""
    ending, at = Ending(params, (), decode), 0
    while at < len(tokens):
        step = rng.randrange(1, 6)
        end = ending.cut(as_tokens(tokens[at : at + step]), 1 << 20)
        if end.reason is not None:
            return at + end.count, end.text
        at += step
    return None


def a_case(rng, kind, size, decode):
    """Tokens out of a small pool, so that strings come again, and stop strings out of what they say."""
    pool = [rng.randrange(size) for _ in range(rng.choice([2, 4, 8, 40]))]
    if kind in ("byte_fallback", "plain_bytes", "byte_level") and rng.random() < 0.6:
        pool += [0xC3, 0xA9, 0xE4, 0xB8, 0xAD]
    tokens = [rng.choice(pool) for _ in range(rng.choice([5, 20, 60, 200]))]
    if rng.random() < 0.3:
        at = rng.randrange(len(tokens))
        tokens[at:at] = [size - 1] * rng.choice([10, 300])  # special tokens, which add no text
    text = decode(tokens)
    stops = [rng.choice(["the", "</s>", " a", "é", "中中", "\n\n", "never"])]
    for _ in range(rng.randrange(3)):
        at = int(len(text) * rng.random() ** 0.2)
        stops.append(text[at : at + rng.randrange(1, 9)])
    stops = [stop for stop in stops if stop and (MARK not in stop or rng.random() < 0.1)]
    least = rng.choice([0, 0, 1, 3, len(tokens) // 2, len(tokens) - 1])
    return tokens, SamplingParams(stop=stops or ["never"], min_tokens=least, max_tokens=1 << 20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tail_ends_a_response_where_its_whole_text_does(kind):
    size, decode = KINDS[kind]()
    rng, ends = random.Random(7), 0
    for _ in range(60):
        tokens, params = a_case(rng, kind, size, decode)
        expected = reference(tokens, params, decode)
        assert ended(tokens, params, decode, rng) == expected, (params.stop, params.min_tokens, tokens)
        ends += expected is not None
        at = completed(tokens, params, decode)
        if expected is not None and at is not None:
            assert (at[0], decode(tokens[: at[0]])[: at[1]]) == expected
    assert ends > 5


@pytest.mark.parametrize("text", ["word ", "é", "中"])
def test_the_work_of_a_token_does_not_grow_with_the_response(text):
    size, decode = byte_level()
    del size
    read = [0]

    def counted(ids):
        read[0] += len(ids)
        return decode(ids)

    work = []
    for count in (500, 4000):
        read[0] = 0
        tail = Tail(("</answer>", "</s>"), counted)
        for at in range(count):
            byte = text.encode()[at % len(text.encode())]
            assert tail.add(byte) is None
        work.append(read[0] / count)
    assert work[1] < 1.5 * work[0]
    assert work[1] < 600


@pytest.mark.parametrize("special", [True, False])
def test_long_runs_without_text_or_without_characters_cost_no_more(special):
    size, decode = byte_fallback()
    read = [0]

    def counted(ids):
        read[0] += len(ids)
        return decode(ids)

    tail = Tail(("</s>",), counted, [260])
    for _ in range(4000):
        tail.add(size - 1 if special else 0xA9)
    assert read[0] < 4000 * 1000  # the whole response at every token would be twice as much as that
    assert tail.add(258) is None


def letters(tokens):
    return "".join("abcdefghijklmnop"[token] for token in tokens)


def end_of(tokens, stop, least, decode=letters):
    end = cut(as_tokens(tokens), as_tokens([]), SamplingParams(stop=stop, min_tokens=least), (), 99, decode)
    return end.count, end.reason, end.text


def test_a_stop_string_from_before_min_tokens_ends_nothing_and_stays_in_the_text():
    assert end_of([0, 1, 2, 3], "ab", 2) == (4, None, None)
    assert end_of([0, 1, 2, 0, 1, 3], "ab", 2) == (5, "stop", "abc")


def test_a_stop_string_that_reaches_beyond_min_tokens_ends_the_response():
    assert end_of([0, 1, 2, 3], "bc", 2) == (3, "stop", "a")


def test_overlapping_ends_count_each_for_itself():
    assert end_of([0, 0, 0, 1], "aa", 2) == (3, "stop", "a")


def test_a_begun_response_ends_as_the_whole_one():
    size, decode = byte_level()
    rng = random.Random(3)
    for _ in range(20):
        tokens, params = a_case(rng, "byte_level", size, decode)
        expected, at = reference(tokens, params, decode), rng.randrange(len(tokens))
        if expected is None or expected[0] <= at or MARK in decode(tokens[:at])[-1:]:
            continue
        end = Ending(params, (), decode, tokens[:at]).cut(as_tokens(tokens[at:]), 1 << 20)
        assert (at + end.count, end.text) == expected
