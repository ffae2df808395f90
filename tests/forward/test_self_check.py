"""The packed pass of a policy is compared with the policy's own when it is loaded, and what differs is refused."""

import re
import time

import numpy as np
import pytest
import torch
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from families import tiny_family
from paceline.config import EngineConfig
from paceline.engines.hf import HFEngine
from paceline.forward import attention, self_check
from paceline.forward.attention import Call, PassPlan, PassRow, UnsupportedModelError
from paceline.forward.kv import KVSlots
from paceline.forward.runner import Runner
from paceline.rl.notices import warnings_told
from paceline.schema import FailedRequestError, RolloutRequest, SamplingParams, as_tokens
from tiny_models import ARCHITECTURES, tiny

_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def untrained(**changes):
    """A Llama as it is before training: weights of 0.02, logits that are almost equal."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SHAPE | changes)).eval()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["untrained", *ARCHITECTURES])
def test_a_sound_policy_passes_in_every_dtype(kind, dtype):
    model = untrained().to(dtype) if kind == "untrained" else tiny(kind, dtype=dtype)
    Runner(model).close()


# Broken passes. Each of them is a mistake that an attention implementation can make without an error.


def _unmasked(monkeypatch):
    def allowed(self, window):
        return np.ones((self.batch, self.queries, self.length), dtype=bool)

    monkeypatch.setattr(Call, "allowed", allowed)


def _late_mask(monkeypatch):
    real = Call.allowed

    def allowed(self, window):
        seen = real(self, window)
        return seen | np.roll(seen, 1, axis=2)  # one key of the future

    monkeypatch.setattr(Call, "allowed", allowed)


def _siblings_visible(monkeypatch):
    monkeypatch.setattr(PassRow, "is_chain", property(lambda _: True))


def _siblings_follow(monkeypatch):
    def positions(self):
        return np.arange(self.start, self.start + self.total)

    monkeypatch.setattr(PassRow, "positions", positions)


def _positions_from_zero(monkeypatch):
    real = PassPlan.__init__

    def init(self, rows, *args):
        real(self, rows, *args)
        self.position_N = torch.from_numpy(np.concatenate([row.positions() - row.start for row in rows]))

    monkeypatch.setattr(PassPlan, "__init__", init)


def _attending(change):
    def breaks(monkeypatch):
        real = PassPlan.attend

        def attend(self, index, layer, query_MHD, scaling, window, *extras):
            return change(lambda q, s, w: real(self, index, layer, q, s, w, *extras), query_MHD, scaling, window)

        monkeypatch.setattr(PassPlan, "attend", attend)

    return breaks


def _kv_overwritten(monkeypatch):
    real = KVSlots.write

    def write(self, layer, flat_N, keys_NHD, values_NHD):
        real(self, 0, flat_N, keys_NHD, values_NHD)
        if layer:
            real(self, layer, flat_N, keys_NHD, values_NHD)

    monkeypatch.setattr(KVSlots, "write", write)
    view = KVSlots.view
    monkeypatch.setattr(KVSlots, "view", lambda self, layer, rows, length: view(self, 0 * layer, rows, length))


def _moves_lost(monkeypatch):
    monkeypatch.setattr(KVSlots, "move_positions", lambda *_: None)


def _slots_mixed(monkeypatch):
    real = KVSlots.view

    def view(self, layer, rows, length):
        keys, values = real(self, layer, rows, length)
        return keys.flip(0), values.flip(0)

    monkeypatch.setattr(KVSlots, "view", view)


def _values_of_keys(monkeypatch):
    real = KVSlots.view

    def view(self, layer, rows, length):
        keys, _ = real(self, layer, rows, length)
        return keys, keys

    monkeypatch.setattr(KVSlots, "view", view)


BROKEN = {
    "no mask": _unmasked,
    "mask late by one": _late_mask,
    "siblings see each other": _siblings_visible,
    "siblings at positions one after the other": _siblings_follow,
    "positions of a chunk from zero": _positions_from_zero,
    "scaled": _attending(lambda real, q, s, w: real(q, 1.1 * (q.shape[-1] ** -0.5 if s is None else s), w)),
    "swapped heads": _attending(lambda real, q, s, w: real(q.flip(1), s, w).flip(1)),
    "keys of one layer for all": _kv_overwritten,
    "an accepted branch is not moved": _moves_lost,
    "rows of each other": _slots_mixed,
    "keys as values": _values_of_keys,
}


@pytest.mark.parametrize("policy", ["untrained", "llama", "untrained bfloat16"])
@pytest.mark.parametrize("broken", BROKEN)
def test_every_broken_pass_is_refused_in_one_line(monkeypatch, broken, policy):
    model = tiny("llama", dtype=torch.float32) if policy == "llama" else untrained()
    if "bfloat16" in policy:
        model = model.to(torch.bfloat16)
    BROKEN[broken](monkeypatch)
    with pytest.raises(UnsupportedModelError) as refusal:
        Runner(model)
    assert "\n" not in str(refusal.value)
    assert "packed forward pass differs from its own" in str(refusal.value)
    assert "first in layer" in str(refusal.value)
    assert model.config._attn_implementation == "sdpa"
    assert not model.base_model._forward_hooks


@pytest.mark.parametrize("window", [6, 100])
def test_a_lost_window_is_found_without_a_text_that_long(monkeypatch, window):
    model = tiny_family("mistral", sliding_window=window)
    _attending(lambda real, q, s, w: real(q, s, None))(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=rf"beyond a window \(of {window}, narrowed to 3\)|differs"):
        Runner(model)
    assert model.config.sliding_window == window


def test_a_window_off_by_one_is_found(monkeypatch):
    _attending(lambda real, q, s, w: real(q, s, w and w + 1))(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="beyond a window"):
        Runner(tiny_family("mistral", sliding_window=100))


def test_a_model_that_does_not_hand_its_window_on_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"PhimoeForCausalLM.* differs .*beyond a window"):
        Runner(tiny_family("phimoe", sliding_window=100))


def test_a_wrong_rope_beyond_its_threshold_is_found_at_the_threshold():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    model = untrained(rope_parameters=rope)
    assert self_check.rope_thresholds(model) == {"yarn": 64}
    Runner(model).close()
    rotary = model.model.rotary_emb
    real = type(rotary).forward
    self_check._CHECKED.pop(model)

    def clamped(x, position_ids):  # as a table would be that ends there
        packed = position_ids if model.config._attn_implementation == "eager" else position_ids.clamp(max=63)
        return real(rotary, x, packed)

    rotary.forward = clamped
    with pytest.raises(UnsupportedModelError, match=r"at position 64 \(yarn\)"):
        Runner(model)


def test_a_layer_that_attends_twice_is_refused_also_without_the_check():
    torch.manual_seed(0)
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**_SHAPE)).eval()
    with pytest.raises(UnsupportedModelError, match="DiffLlamaForCausalLM: layer 0 attends more than once"):
        Runner(model)
    engine = HFEngine(model, config=EngineConfig(self_check=False))
    with pytest.raises(FailedRequestError, match="attends more than once"):
        engine.generate([RolloutRequest(request_id="a", prompt=as_tokens([1, 2]), params=SamplingParams(max_tokens=2))])


def longrope(context=128, original=32):
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 3.0, 2.0, 1.5],
        "original_max_position_embeddings": original,
    }
    shape = _SHAPE | {"max_position_embeddings": context}
    config = Phi3Config(**shape, original_max_position_embeddings=original, rope_parameters=rope)
    model = Phi3ForCausalLM(config).to(torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.5)
    return model


def test_longrope_is_refused_where_a_sequence_could_cross_its_threshold():
    with pytest.raises(UnsupportedModelError, match=r"longrope .* beyond 32 positions; set engine.context=32"):
        HFEngine(longrope())
    with pytest.raises(UnsupportedModelError, match="it is 33"):
        HFEngine(longrope(), config=EngineConfig(context=33))


def test_longrope_within_its_threshold_decodes_as_generate_does():
    model, prompt = longrope(), [5, 9, 3, 7]
    want = model.generate(torch.tensor([prompt]), do_sample=False, max_length=32, pad_token_id=0)[0, 4:].tolist()
    engine = HFEngine(model, config=EngineConfig(context=32))
    params = SamplingParams(temperature=0.0, max_tokens=100)
    (rollout,) = engine.generate([RolloutRequest(request_id="a", prompt=as_tokens(prompt), params=params)])
    assert rollout.tokens.tolist() == want
    assert len(want) == 28


def test_half_precision_is_checked_in_float32_and_comes_back_bit_for_bit():
    model = untrained().to(torch.bfloat16)
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    Runner(model).close()
    for name, p in model.named_parameters():
        assert p.dtype == torch.bfloat16
        assert p.data_ptr() == before[name][0]
        assert torch.equal(p, before[name][1])


def test_without_the_check_nothing_is_compared(monkeypatch):
    _unmasked(monkeypatch)
    HFEngine(untrained(), config=EngineConfig(self_check=False)).close()


def test_a_model_is_checked_once(monkeypatch):
    calls, real = [], self_check._own_logits
    monkeypatch.setattr(self_check, "_own_logits", lambda *args: calls.append(1) or real(*args))
    model = untrained()
    for _ in range(3):
        HFEngine(model).close()
    assert len(calls) == 1


def test_a_run_is_informed_once_that_its_policy_passed():
    lines, model = [], untrained()
    with warnings_told(lines.append):
        Runner(model).close()
        Runner(model).close()
    Runner(untrained()).close()
    (line,) = lines
    found = re.fullmatch(
        r"policy checked against its own forward pass: LlamaForCausalLM, (\S+) s, worst difference (\S+) of the "
        "logits' spread",
        line,
    )
    assert float(found[1]) > 0
    assert 0 < float(found[2]) < 1e-4


def test_the_check_leaves_the_memory_empty_and_the_model_in_the_engines_hands():
    runner = Runner(untrained())
    assert runner.kv.nbytes == 0
    assert runner.model.config._attn_implementation == attention.NAME


def test_a_small_policy_is_checked_in_about_a_second():
    model = untrained(hidden_size=128, intermediate_size=256, num_hidden_layers=4)
    started = time.perf_counter()
    Runner(model).close()
    assert time.perf_counter() - started < 20  # of one second that it should take


def test_a_policy_whose_own_logits_are_not_finite_is_not_judged_and_named(caplog):
    model = untrained()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(float("nan"))
    with caplog.at_level("WARNING", logger="paceline.forward"):
        Runner(model)
    assert "not checked against its own forward pass: its logits are not finite" in caplog.text
