"""The invariant mode of whole models: equal logits for equal prefixes, whatever the pass; and what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from paceline.forward import invariant
from paceline.forward.attention import PassRow
from paceline.forward.invariant import Census, InvariantError, Padded
from paceline.forward.runner import Runner
from tiny_models import ARCHITECTURES, VOCABULARY, tiny
from tiny_policies import tiny_config

NONE = np.empty(0, dtype=np.int32)
KINDS = (*ARCHITECTURES, "soft capped")


def model_of(kind):
    if kind != "soft capped":
        return tiny(kind, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(tiny_config("gemma3")).eval()


def sequences(count, length, seed=0):
    return np.random.default_rng(seed).integers(1, VOCABULARY, (count, length))


class Alone:
    """Logits after a prefix, from passes of one token in one slot."""

    def __init__(self, runner, slot=0):
        self.runner, self.slot = runner, slot
        self._cached = []
        self._known = {}

    def after(self, prefix):
        """(V,) logits that follow ``prefix``."""
        tokens = [int(token) for token in prefix]
        if tuple(tokens) not in self._known:
            shared = 0
            while shared < min(len(tokens), len(self._cached)) and tokens[shared] == self._cached[shared]:
                shared += 1
            for position in range(min(shared, len(tokens) - 1), len(tokens)):
                row = PassRow(self.slot, position, 1, NONE)
                logits = self.runner.forward([np.array([tokens[position]])], [row], np.array([0]))
                self._known[tuple(tokens[: position + 1])] = logits[0]
            self._cached = tokens
        return self._known[tuple(tokens)]


@pytest.fixture(scope="module")
def alone():
    kept = {}

    def make(kind):
        if kind not in kept:
            kept[kind] = Alone(Runner(model_of(kind), invariant=True))
            kept[kind].runner.kv.resize(1, 128)
        return kept[kind]

    return make


def filled(kind, lengths, seqs, slots):
    runner = Runner(model_of(kind), invariant=True)
    runner.kv.resize(slots, 96)
    for slot, (length, seq) in enumerate(zip(lengths, seqs, strict=True)):
        if length:
            runner.forward([seq[:length]], [PassRow(slot, 0, length, NONE)], np.empty(0, dtype=np.int64))
    return runner


def paths(parents):
    """The nodes from the root down to each node."""
    found = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found


@settings(max_examples=12, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10**6))
def test_a_pass_of_random_chunks_and_trees_gives_every_token_its_own_logits(alone, kind, seed):
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 5))
    seqs = sequences(rows, 70, seed % 3)
    lengths = [int(rng.integers(0, 24)) for _ in range(rows)]
    runner = filled(kind, lengths, seqs, rows + int(rng.integers(0, 3)))
    tokens, shares, expected = [], [], []
    for slot in range(rows):
        start, count = lengths[slot], int(rng.integers(1, 20))
        drafted = int(rng.integers(0, 12))
        parents = np.array([int(rng.integers(-1, node)) for node in range(drafted)], dtype=np.int32)
        nodes = rng.integers(1, VOCABULARY, drafted)
        tokens.append(np.concatenate([seqs[slot, start : start + count], nodes]))
        shares.append(PassRow(slot, start, count, parents))
        expected += [seqs[slot, : start + i + 1] for i in range(count)]
        committed = seqs[slot, : start + count]
        expected += [np.concatenate([committed, nodes[path]]) for path in paths(parents)]
    logits = runner.forward(tokens, shares, np.arange(len(expected)))
    for row, prefix in zip(logits, expected, strict=True):
        assert torch.equal(row, alone(kind).after(prefix))


@pytest.mark.parametrize("kind", KINDS)
def test_the_ordinary_mode_is_close_and_not_equal(kind):
    (seq,) = sequences(1, 60)
    found = {}
    for mode in (True, False):
        for chunk in (1, 60):
            runner = Runner(model_of(kind), invariant=mode)
            runner.kv.resize(1, 64)
            passes = [
                runner.forward([seq[at : at + chunk]], [PassRow(0, at, chunk, NONE)], np.arange(chunk))
                for at in range(0, 60, chunk)
            ]
            found[mode, chunk] = torch.cat(passes)
            runner.close()
    assert torch.equal(found[True, 1], found[True, 60])
    assert not torch.equal(found[False, 1], found[False, 60])
    assert (found[True, 1] - found[False, 1]).abs().max() < 1e-4 * found[False, 1].abs().max()


def test_with_two_threads_chunks_change_no_bit():
    (seq,) = sequences(1, 20)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        runner = Runner(model_of("llama"), invariant=True)
        runner.kv.resize(3, 64)
        whole = runner.forward([seq], [PassRow(2, 0, 20, NONE)], np.arange(20))
        chunked = [runner.forward([seq[i : i + 1]], [PassRow(1, i, 1, NONE)], np.array([0])) for i in range(20)]
        assert torch.equal(whole, torch.cat(chunked))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_refit_the_new_weights_are_in_force(kind):
    (seq,) = sequences(1, 20)
    others = model_of(kind)
    with torch.no_grad():
        for parameter in others.parameters():
            parameter.mul_(1.1)
    runner, fresh = Runner(model_of(kind), invariant=True), Runner(others, invariant=True)
    runner.load_weights(dict(others.named_parameters()), None)
    logits = []
    for each in (runner, fresh):
        each.kv.resize(1, 32)
        logits.append(each.forward([seq], [PassRow(0, 0, 20, NONE)], np.arange(20)))
    assert torch.equal(*logits)


def test_a_weight_that_was_written_behind_its_back_is_in_force_in_the_next_pass():
    model = model_of("llama")
    runner = Runner(model, invariant=True)
    runner.kv.resize(1, 32)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert not runner.forward([np.array([1])], [PassRow(0, 0, 1, NONE)], np.array([0])).any()


def test_a_closed_runner_gives_the_model_back_as_it_was():
    model = model_of("gemma3")
    Runner(model, invariant=True).close()
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("module", [torch.nn.SiLU(), torch.nn.GELU(), torch.nn.GELU(approximate="tanh")])
def test_padded_activations_do_not_know_their_place(module):
    x = torch.randn(40_000) * 5
    plain = module(x)
    assert not all(torch.equal(module(x[i : i + 1]), plain[i : i + 1]) for i in range(400))
    padded = Padded(module)
    whole = module(x)
    for start, count in ((0, 1), (7, 3), (3, 19), (100, 64), (16_380, 50), (11, 39_000)):
        assert torch.equal(module(x[start : start + count]), whole[start : start + count])
    assert torch.allclose(whole, plain, atol=1e-6)
    padded.undo()
    assert "forward" not in vars(module)


@pytest.mark.parametrize("function", [torch.exp, torch.cos, torch.sin, torch.tanh, torch.rsqrt])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_by_entry_do_not_know_their_place(function, dtype):
    x = (torch.rand(40_000) * 200).to(dtype) if function in (torch.cos, torch.sin) else torch.rand(40_000).to(dtype) * 9
    whole = function(x)
    for start, count in ((0, 1), (7, 3), (3, 19), (5, 63), (16_380, 50), (11, 39_000)):
        assert torch.equal(function(x[start : start + count].clone()), whole[start : start + count])
        assert torch.equal(function(x[start : start + count]), whole[start : start + count])


@pytest.mark.parametrize("size", [8, 16, 48, 100, 576, 1024])
def test_means_of_rows_do_not_know_the_other_rows(size):
    x = torch.randn(1, 300, size)
    alone = torch.cat([x[:, i : i + 1].pow(2).mean(-1, keepdim=True) for i in range(300)], dim=1)
    for count in (2, 3, 5, 8, 17, 64, 300):
        assert torch.equal(x[:, :count].pow(2).mean(-1, keepdim=True), alone[:, :count])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.double(), "needs policy.dtype float32, this model is float64"),
        (lambda m: m.to(torch.bfloat16), "needs policy.dtype float32, this model is bfloat16"),
        (lambda m: m.to("meta"), "runs on the CPU, this model is on meta"),
        (lambda m: m.lm_head.double(), "needs all weights in float32, lm_head.weight is float64"),
        (lambda m: setattr(m.model.rotary_emb, "rope_type", "dynamic"), "cannot hold with dynamic rotary embeddings"),
    ],
)
def test_what_cannot_hold_is_refused_in_one_line(change, message):
    model = model_of("llama")
    change(model)
    with pytest.raises(InvariantError, match=f"^engine.invariant {message}.*; set engine.invariant=false$"):
        Runner(model, invariant=True)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_a_torch_without_onednn_is_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(InvariantError, match="needs a torch with oneDNN"):
        Runner(model_of("llama"), invariant=True)


class Mixing(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(x)


class Subclass(torch.nn.Linear):
    pass


@pytest.mark.parametrize(("name", "module"), [("silu", Mixing()), ("linear", Subclass(48, 48))])
def test_a_model_with_an_operator_of_its_own_is_refused_and_given_back(name, module):
    model = model_of("llama")
    model.model.layers[1].mlp.act_fn = module
    with pytest.raises(InvariantError, match=rf"the model uses aten.{name} outside .*; set engine.invariant=false$"):
        Runner(model, invariant=True)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_the_census_lets_no_float32_sum_pass():
    with torch.inference_mode(), Census():
        torch.ones(3, dtype=torch.float64).sum()
        with pytest.raises(InvariantError, match=r"aten\.sum"):
            torch.ones(3).sum()
        with pytest.raises(InvariantError, match=r"aten\.softmax"):
            torch.ones(3).softmax(-1)


@pytest.mark.model
def test_smollm2_gives_equal_bits_alone_in_a_batch_and_in_trees():
    from paceline.rl.models import smollm2_dir

    model = AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32)
    seqs = np.random.default_rng(0).integers(0, 49152, (4, 60))
    runner = Runner(model, invariant=True)
    alone = Alone(runner, slot=4)
    runner.kv.resize(5, 96)
    parents = np.array([-1, 0, -1, 2, 1, 3], dtype=np.int32)
    nodes = seqs[3, :6]
    rows = [PassRow(0, 0, 30, NONE), PassRow(2, 0, 9, NONE), PassRow(3, 0, 20, parents)]
    logits = runner.forward([seqs[0, :30], seqs[1, :9], np.concatenate([seqs[2, :20], nodes])], rows, np.arange(65))
    assert torch.equal(logits[29], alone.after(seqs[0, :30]))
    assert torch.equal(logits[38], alone.after(seqs[1, :9]))
    for node, path in enumerate(paths(parents)):
        assert torch.equal(logits[59 + node], alone.after(np.concatenate([seqs[2, :20], nodes[path]])))


def test_the_list_of_operators_names_each_once():
    words = f"{invariant._MOVES} {invariant._CORRECTLY_ROUNDED} {invariant._BY_ENTRY_OR_ROW}".split()
    assert len(words) == len(set(words))
