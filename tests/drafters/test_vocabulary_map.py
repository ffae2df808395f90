"""Draft models whose tokenizer is another: what is shared is drafted, the rest is spelled, and no token changes."""

import copy

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from paceline.config import BudgetConfig, DrafterConfig, DraftModelConfig, EngineConfig
from paceline.drafters import PolicyTraits, make_drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.vocabulary_map import VocabularyError, VocabularyMap
from paceline.engines.hf import HFEngine
from paceline.rl.loop import train
from paceline.sampling.keyed import block_logsumexp, keyed_sample
from paceline.sampling.noise import signed64
from paceline.schema import Outcome, PacelineError, RolloutRequest, SamplingParams, as_tokens
from tiny_policies import BOS, EOS, VOCABULARY, byte_tokenizer, save_tiny
from tiny_policies import tiny_config as tiny_config_of
from tiny_run import tiny_config

SEED = 3
#: Byte pairs that the draft model's tokenizer has made one, beside all bytes in another order.
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a"), ("0", "1")]


def merged_tokenizer(merges=MERGES, drop=()):
    """Byte-level like the policy's, in the reverse order, with ``merges``; its bytes ``drop`` are not there."""
    alphabet = [piece for piece in sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True) if piece not in drop]
    pieces = ["<pad>", *alphabet, *["".join(pair) for pair in merges]]
    bpe = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<pad>", "</s>", "<bos>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", bos_token="<bos>", pad_token="<pad>")


def piece_tokenizer():
    """Pieces with a mark for spaces, and bytes to fall back on."""
    pieces = ["<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "a", "b", "▁", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    bpe = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges, byte_fallback=True)
    )
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bpe.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


def model_of(vocabulary, seed=0, kind="llama"):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config_of(kind).__class__(
        **{**tiny_config_of(kind).to_dict(), "vocab_size": vocabulary}), dtype=torch.float64)  # fmt: skip


def between(policy, draft):
    return VocabularyMap.between(policy, draft, (len(policy), len(draft)), "the draft model")


def traits(acceptance="coupled", **changes):
    given = {"vocabulary_size": VOCABULARY, "run_seed": SEED, "eos_ids": (EOS,), "acceptance": acceptance}
    return PolicyTraits(**{**given, **changes})


def requests(texts=("the thing in 01", "a\nb", "\xff?"), max_tokens=12, **params):
    tokenizer = byte_tokenizer()
    return [
        RolloutRequest(
            request_id=f"r{n}",
            prompt=as_tokens([BOS, *tokenizer(text)["input_ids"]]),
            params=SamplingParams(max_tokens=max_tokens, **params),
        )
        for n, text in enumerate(texts * 2)
    ]


def run(policy, reqs, drafter=None, acceptance="coupled"):
    engine = HFEngine(
        policy, drafter=drafter, budget=4, budget_config=BudgetConfig(mode="fixed"), seed=SEED, eos_ids=(EOS,),
        config=EngineConfig(acceptance=acceptance),
    )  # fmt: skip
    try:
        return [r.tokens.tolist() for r in engine.generate(reqs)], engine.stats()
    finally:
        engine.close()


def test_tokens_of_the_same_bytes_are_shared_and_others_are_spelled():
    ours, theirs = byte_tokenizer(), merged_tokenizer(drop=("x",))
    there = between(ours, theirs)
    assert len(there.shared_K) == 255 + 2
    for token, own in zip(there.shared_K.tolist(), there.drafts_K.tolist(), strict=True):
        if token not in (EOS, BOS):
            assert ours.convert_ids_to_tokens(token) == theirs.convert_ids_to_tokens(own)
        assert there.spell(token) == (own,)
    assert there.spell(BOS) == (theirs.convert_tokens_to_ids("<bos>"),)
    # What ends a text ends it by any name.
    assert there.spell(EOS) == (theirs.eos_token_id,)
    # A byte that the draft model cannot say is left out.
    assert there.spell(ours.convert_tokens_to_ids("x")) == ()
    back = between(theirs, ours)
    assert back.spell(theirs.convert_tokens_to_ids("the")) == tuple(ours.convert_tokens_to_ids(list("the")))
    assert back.spell(theirs.convert_tokens_to_ids("<pad>")) == ()


def test_marks_for_spaces_and_byte_pieces_mean_the_bytes_that_they_stand_for():
    ours, theirs = merged_tokenizer([*MERGES, ("Ġa", "b"), ("Ã", "¤")]), piece_tokenizer()
    there = between(ours, theirs)

    def spelled(piece):
        return theirs.convert_ids_to_tokens(list(there.spell(ours.convert_tokens_to_ids(piece))))

    assert spelled("Ġab") == ["▁ab"]
    assert spelled("a") == ["a"]
    assert spelled("Ġ") == ["▁"]
    assert spelled("Ċ") == ["<0x0A>"]
    assert spelled("Ã¤") == ["<0xC3>", "<0xA4>"]
    assert spelled("th") == ["<0x74>", "<0x68>"]


def test_what_every_text_begins_with_is_put_before_it_once():
    ours, theirs = byte_tokenizer(), merged_tokenizer()
    assert between(ours, theirs).opening == ()
    from tokenizers.processors import TemplateProcessing

    start = theirs.bos_token_id
    theirs.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", start)])
    there = between(ours, theirs)
    assert there.opening == (start,)
    drafter = DraftModelDrafter(model_of(len(theirs)), traits(), vocabulary=there)
    with_bos, without = requests(("in",))[0], requests(("in",))[1]
    without.prompt = without.prompt[1:]
    drafter.start([with_bos, without])
    own = [start, *there.spell(int(with_bos.prompt[1])), *there.spell(int(with_bos.prompt[2]))]
    assert all(drafter._live[name].tokens(0, 9).tolist() == own for name in ("r0", "r1"))


def test_too_little_in_common_is_refused_with_both_sizes():  # field I2
    spaces = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, **{"Ġ" * n: n for n in range(2, 40)}}, merges=[]))
    spaces.decoder = decoders.ByteLevel()
    far = PreTrainedTokenizerFast(tokenizer_object=spaces)
    with pytest.raises(VocabularyError, match=r"has 40 tokens, the policy's 258, and they share 2; at least 25%"):
        between(byte_tokenizer(), far)
    with pytest.raises(VocabularyError, match=r"its vocabulary has 40 tokens, the policy's 258; .*must have one"):
        VocabularyMap.between(None, far, (258, 40), "the draft model")
    hidden = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="a")))
    with pytest.raises(VocabularyError, match="the bytes of its tokens are not known"):
        between(byte_tokenizer(), hidden)
    # A small vocabulary that lies within the policy's is near enough.
    within = merged_tokenizer((), drop=tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))[:200])
    assert len(between(byte_tokenizer(), within).shared_K) == 56 + 2


def test_a_padded_vocabulary_is_the_same_and_the_same_one_needs_no_map():
    ours = byte_tokenizer()
    assert between(ours, byte_tokenizer()) is None
    assert VocabularyMap.between(None, None, (7, 7), "it") is None
    for padded in (264, 250):
        there = VocabularyMap.between(ours, byte_tokenizer(), (VOCABULARY, padded), "it")
        assert there.is_same
        assert len(there.shared_K) == min(VOCABULARY, padded)
    assert not between(ours, merged_tokenizer()).is_same


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "block"])
def test_the_policy_itself_under_other_ids_is_accepted_fully(acceptance):
    ours, theirs = byte_tokenizer(), merged_tokenizer()
    there, policy = between(ours, theirs), model_of(VOCABULARY)
    draft = model_of(len(theirs))
    with torch.no_grad():
        given = policy.state_dict()
        moved = {name: tensor.clone() for name, tensor in given.items() if tensor.shape[0] != VOCABULARY}
        draft.load_state_dict(moved, strict=False)
        for name, rows in (("model.embed_tokens.weight", 0.0), ("lm_head.weight", -1.0)):
            # Tokens that have no counterpart are there, and likely.
            draft.get_parameter(name).fill_(rows)
            draft.get_parameter(name)[there.drafts_K] = given[name][there.shared_K]
    drafter = DraftModelDrafter(draft, traits(acceptance), vocabulary=there)
    plain, _ = run(copy.deepcopy(policy), requests())
    tokens, stats = run(policy, requests(), drafter, acceptance)
    assert stats.tokens_accepted == stats.tokens_drafted > 0
    assert acceptance != "coupled" or tokens == plain


@pytest.mark.parametrize("width", [1, 3])
def test_tokens_are_those_without_drafts_whatever_the_other_vocabulary(width):  # field I2, E1
    for theirs in (merged_tokenizer(drop=("x", "y")), piece_tokenizer()):
        for params in ({"temperature": 0.0}, {"top_k": 5, "repetition_penalty": 1.3, "temperature": 0.8}):
            drafter = DraftModelDrafter(
                model_of(len(theirs), 9), traits(), vocabulary=between(byte_tokenizer(), theirs), width=width
            )
            plain, _ = run(model_of(VOCABULARY), requests(**params))
            tokens, stats = run(model_of(VOCABULARY), requests(**params), drafter)
            assert tokens == plain
            assert stats.tokens_drafted > 0


@torch.inference_mode()
def test_a_draft_is_sampled_from_the_law_over_shared_tokens_behind_the_spelled_text():
    theirs = merged_tokenizer([("a", "b")], drop=("x",))
    ours = merged_tokenizer([("a", "b"), ("b", "a"), ("x", "y")])
    there, (request,) = between(ours, theirs), requests(("",), max_tokens=30)[:1]
    policy_size, model = len(ours), model_of(len(theirs), 9)
    drafter = DraftModelDrafter(copy.deepcopy(model), traits(vocabulary_size=policy_size), vocabulary=there)
    request.prompt = as_tokens(ours.convert_tokens_to_ids(["a", "ba", "xy", "ab"]))
    drafter.start([request])
    emitted, rng = [], np.random.default_rng(0)
    for _ in range(4):
        (draft,) = drafter.propose(["r0"], 3)
        text = [own for token in [*request.prompt.tolist(), *emitted] for own in there.spell(token)]
        for depth, token in enumerate(draft.tokens.tolist()):
            raw = model(torch.tensor([text])).logits[0, -1]
            law = torch.full((1, policy_size), -torch.inf, dtype=torch.float64)
            law[0, there.shared_K] = raw[there.drafts_K]
            where = torch.tensor([signed64(request.seed)]), torch.tensor([len(emitted) + depth])
            assert token == int(keyed_sample(law, block_logsumexp(law), SEED, *where)[0])
            text += there.spell(token)
        fresh = [*draft.tokens[: rng.integers(0, 3)].tolist(), ours.convert_tokens_to_ids("ba")]
        drafter.commit([Outcome(request_id="r0", tokens=as_tokens(fresh), accepted=len(fresh) - 1, drafted=3)])
        emitted += fresh


def test_a_directory_with_another_tokenizer_is_mapped_and_says_so(tmp_path, caplog):
    policy = model_of(VOCABULARY)
    theirs = merged_tokenizer()
    model_of(len(theirs), 9).save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    config = DrafterConfig(kind="draft_model", draft_model=DraftModelConfig(path=str(tmp_path), dtype="float64"))
    drafter = make_drafter(config, policy=traits(tokenizer=byte_tokenizer()))
    assert "it can draft 258" in caplog.text
    plain, _ = run(model_of(VOCABULARY), requests())
    tokens, stats = run(policy, requests(), drafter)
    assert tokens == plain
    assert stats.tokens_drafted > 0
    with pytest.raises(VocabularyError, match=rf"has {len(theirs)} tokens, the policy's 258; .*both must have one"):
        make_drafter(config, policy=traits())
    # Padded, under the same tokenizer.
    save_tiny(tmp_path / "padded", seed=9)
    model_of(264, 9).save_pretrained(tmp_path / "padded")
    config = DrafterConfig(
        kind="draft_model", draft_model=DraftModelConfig(path=str(tmp_path / "padded"), dtype="float64")
    )
    padded = make_drafter(config, policy=traits(tokenizer=byte_tokenizer()))
    assert run(model_of(VOCABULARY), requests(), padded)[0] == plain


def test_a_model_with_another_tokenizer_is_not_trained_on_the_policys_tokens(tmp_path):
    policy, other = save_tiny(tmp_path / "policy"), tmp_path / "other"
    theirs = merged_tokenizer()
    model_of(len(theirs), 9).save_pretrained(other)
    theirs.save_pretrained(other)
    own = [f"drafter.draft_model.path={other}", "drafter.kind=draft_model", "cotrain.when=every"]
    with pytest.raises(PacelineError, match=r"has a tokenizer of its own, and is not trained; set cotrain\.when=never"):
        train(tiny_config(policy, tmp_path / "run", *own))
