"""The reference engine under the sentinel: what refits do to real drafters, and that canaries leave no trace."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from paceline.config import BudgetConfig, DraftModelConfig, EngineConfig, SentinelConfig
from paceline.drafters import ForcedDrafter, HistoryDrafter, PolicyTraits
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.hf import HFEngine, WeightsError
from paceline.sampling.grammar import Vocabulary
from paceline.schema import RolloutRequest, SamplingParams, as_tokens
from tiny_models import VOCABULARY, tiny
from tiny_policies import byte_tokenizer

WATCHED = SentinelConfig(gap=99)


def requests(visit, count=12, **params):
    rng = np.random.default_rng(7)
    prompts = [as_tokens(rng.integers(1, VOCABULARY, 6)) for _ in range(3)]
    params = SamplingParams(**{"max_tokens": 20, "temperature": 0.4, **params})
    return [
        RolloutRequest(request_id=f"{visit}/{i}", prompt=prompts[i % 3], params=params, group=f"{visit}/{i % 3}")
        for i in range(count)
    ]


def engine_of(drafter, sentinel=WATCHED, mode="fixed", **options):
    config = EngineConfig(sentinel=sentinel)
    return HFEngine(
        tiny(), drafter=drafter, config=config, budget_config=BudgetConfig(mode=mode), eos_ids=(), **options
    )


def moved(step, amount=0.002):
    """The policy's weights after so many small steps."""
    weights = {name: p.detach().clone() for name, p in tiny().named_parameters()}
    random = torch.Generator().manual_seed(step)
    for weight in weights.values():
        if weight.ndim == 2:
            weight += step * amount * weight.std() * torch.randn(weight.shape, generator=random, dtype=weight.dtype)
    return weights


@pytest.fixture
def saved(tmp_path):
    tiny().save_pretrained(tmp_path)
    return DraftModelConfig(path=str(tmp_path), dtype="float64")


def model_drafter(config):
    return DraftModelDrafter.from_config(config, PolicyTraits(vocabulary_size=VOCABULARY, run_seed=0))


def overwriting(engine, drafter):
    """From now on a refit of the policy writes tensors of the same names into the drafter as well."""
    load = engine._runner.load_weights

    def load_both(tensors, expected):
        load(tensors, expected)
        own = dict(drafter.model.named_parameters())
        with torch.no_grad():
            for name in tensors:
                own[name].copy_(torch.randn_like(own[name]))

    engine._runner.load_weights = load_both
    return load


def test_a_refit_that_overwrites_a_draft_model_is_told_and_the_model_loaded_again(saved):  # field G2
    drafter = model_drafter(saved)
    engine = engine_of(drafter)
    engine.generate(requests("0"))
    engine.load_weights(1, moved(1))
    assert engine.stats().events == {}
    healthy = engine.stats().canary_acceptance
    overwriting(engine, drafter)
    engine.load_weights(2, moved(2))
    events = engine.stats().events
    assert events == {"drafter_overwritten": 1, "drafter_lost": 1, "drafter_reloaded": 1}
    assert healthy > 0.5
    assert abs(engine.stats().canary_acceptance - healthy) < 0.2
    before = engine.stats().tokens_accepted
    engine.generate(requests("1"))
    assert engine.stats().tokens_accepted > before


def test_a_draft_model_that_is_nowhere_to_be_had_again_drafts_no_more_and_no_token_changes():  # field G2
    drafter = DraftModelDrafter(tiny(), PolicyTraits(vocabulary_size=VOCABULARY, run_seed=0))
    engine = engine_of(drafter)
    engine.generate(requests("0"))
    overwriting(engine, drafter)
    engine.load_weights(1, moved(1))
    drafted = engine.stats().tokens_drafted
    rollouts = engine.generate(requests("1"))
    assert engine.stats().events == {"drafter_overwritten": 1, "drafter_lost": 1}
    assert engine.stats().tokens_drafted == drafted
    plain = engine_of(None)
    plain.load_weights(1, moved(1))
    assert [r.tokens.tolist() for r in rollouts] == [r.tokens.tolist() for r in plain.generate(requests("1"))]


def test_a_draft_model_that_stays_behind_is_told_with_both_versions(saved):  # field G5
    engine = engine_of(model_drafter(saved), replace(WATCHED, gap=1))
    engine.generate(requests("0"))
    for version in (1, 2, 3):
        engine.load_weights(version, moved(version))
    stats = engine.stats()
    assert stats.events == {"drafter_stale": 1, "drafter_reloaded": 1}
    assert (stats.weight_version, stats.drafter_version) == (3, 0)
    assert engine.is_drafting
    assert engine_of(HistoryDrafter()).stats().drafter_version is None


def test_a_drafter_that_falls_silent_is_lost_until_it_drafts_again():  # field G1
    drafter = HistoryDrafter()
    engine = engine_of(drafter)
    engine.generate(requests("0"))
    engine.load_weights(1, moved(1))
    assert engine.stats().canary_acceptance > 0.4
    propose, drafter.propose = drafter.propose, lambda request_ids, budget: []
    engine.load_weights(2, moved(2))
    assert engine.stats().events == {"drafter_lost": 1}
    assert engine.stats().canary_acceptance == 0
    drafter.propose = propose
    drafted = engine.stats().tokens_drafted
    engine.generate(requests("1"))
    assert engine.stats().tokens_drafted == drafted
    engine.load_weights(3, moved(3))
    assert engine.stats().events == {"drafter_lost": 1, "drafter_resumed": 1}
    engine.generate(requests("2"))
    assert engine.stats().tokens_drafted > drafted


@pytest.mark.parametrize("kind", ["history", "model"])
def test_canaries_leave_no_trace(kind, saved):
    """Not in tokens, drafts, counters or history: a run that is watched does what one does that is not."""

    def run(sentinel):
        drafter = HistoryDrafter(salt=1) if kind == "history" else model_drafter(saved)
        engine = engine_of(drafter, sentinel)
        said = []
        for visit in range(4):
            rollouts = engine.generate(requests(str(visit)))
            said += [(r.request_id, r.tokens.tolist(), r.accept_lengths.tolist()) for r in rollouts]
            engine.load_weights(visit + 1, moved(visit + 1))
        stats = engine.stats()
        counted = {name: getattr(stats, name) for name in stats.__struct_fields__ if "seconds" not in name}
        del counted["canary_acceptance"]
        return said, counted, engine.history_snapshot(), engine.controller.state()

    watched, unwatched = run(WATCHED), run(SentinelConfig(canaries=0, checksums=False, gap=99))
    assert watched == unwatched


def test_a_refit_with_requests_in_flight_has_no_canary_and_no_token_changes():  # field G11
    def run(sentinel):
        engine = engine_of(HistoryDrafter(), sentinel)
        engine.generate(requests("0"))
        engine.submit(requests("1"))
        out = [engine.step()]
        engine.load_weights(1, moved(1))
        while engine.busy:
            out.append(engine.step())
        return engine, {r.request_id: r.tokens.tolist() for rollouts in out for r in rollouts}

    engine, said = run(WATCHED)
    assert engine.stats().events == {"canary_skipped": 1}
    _, plain = run(SentinelConfig(canaries=0, gap=99))
    assert said.keys() == plain.keys()
    engine.load_weights(2, moved(2))
    assert engine.stats().canary_acceptance > 0


def test_weights_that_do_not_arrive_or_move_unasked_are_told():
    engine = engine_of(None, refit_names=["model.norm.weight"])
    load = engine._runner.load_weights
    engine._runner.load_weights = lambda tensors, expected: None
    engine.load_weights(1, {"model.norm.weight": torch.full((32,), 1.5, dtype=torch.float64)})
    assert engine.stats().events == {"policy_stale": 1}
    engine._runner.load_weights = load
    with torch.no_grad():
        engine._runner.model.lm_head.weight[3, 4] += 1e-9
    engine.load_weights(2, {"model.norm.weight": torch.ones(32, dtype=torch.float64)})
    assert engine.stats().events == {"policy_stale": 1, "policy_overwritten": 1}


def test_new_weights_of_another_dtype_are_no_fault():
    engine = engine_of(None)
    engine.load_weights(1, {name: tensor.float() for name, tensor in moved(1).items()})
    assert engine.stats().events == {}


def test_canaries_that_would_not_fit_the_memory_are_skipped():
    config = EngineConfig(sentinel=replace(WATCHED, tokens=200), kv_tokens=60, slots=2)
    engine = HFEngine(tiny(context=512), drafter=HistoryDrafter(), config=config, eos_ids=())
    engine.generate(requests("0", count=2))
    engine.load_weights(1, {name: p.detach().clone() for name, p in tiny(context=512).named_parameters()})
    assert engine.stats().events["canary_skipped"] == 1
    assert not engine.busy


def test_a_reload_brings_the_weights_back_and_the_next_drafts_use_them(saved):
    drafter = model_drafter(saved)
    drafter.start(requests("0", count=1, temperature=0.0))
    (first,) = drafter.propose(["0/0"], 6)
    with torch.no_grad():
        for parameter in drafter.model.parameters():
            parameter.add_(1.0)
    assert drafter.propose(["0/0"], 6)[0].tokens.tolist() != first.tokens.tolist()
    assert drafter.reload()
    assert drafter.propose(["0/0"], 6)[0].tokens.tolist() == first.tokens.tolist()


# A drafter with weights of any kind


class Learning(HistoryDrafter):
    """Drafts what it remembers while its one weight begins with 1; a reload brings back what was loaded last."""

    def __init__(self):
        super().__init__(salt=1)
        self.gate = torch.ones(3)
        self.weights_version = 0
        self.last = {"gate": torch.ones(3)}

    @property
    def weights(self):
        return {"gate": self.gate}

    def load_weights(self, version, tensors):
        if set(tensors) != {"gate"}:
            raise WeightsError("the set of weights lacks gate (1 missing, 0 unknown); none was loaded")
        self.last, self.weights_version = {"gate": tensors["gate"].clone()}, version
        self.gate.copy_(tensors["gate"])

    def reload(self):
        self.gate.copy_(self.last["gate"])
        return True

    def propose(self, request_ids, budget):
        return super().propose(request_ids, budget) if self.gate[0] == 1 else []


def test_weights_of_a_drafter_are_loaded_by_name_and_are_no_fault():
    drafter = Learning()
    engine = engine_of(ForcedDrafter(drafter, Vocabulary(byte_tokenizer())), replace(WATCHED, gap=0))
    engine.generate(requests("0"))
    for version in (1, 2):
        engine.load_drafter_weights(version, {"gate": torch.tensor([1.0, version, 0.0])})
        engine.load_weights(version, moved(version))
    assert drafter.gate.tolist() == [1.0, 2.0, 0.0]
    stats = engine.stats()
    assert (stats.weight_version, stats.drafter_version, stats.events) == (2, 2, {})
    assert stats.canary_acceptance > 0.4
    with pytest.raises(WeightsError, match="lacks gate"):
        engine.load_drafter_weights(3, {})
    assert engine.stats().drafter_version == 2
    with pytest.raises(WeightsError, match="no model drafts"):
        engine_of(HistoryDrafter()).load_drafter_weights(1, {})
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.load_drafter_weights(3, {"gate": torch.ones(3)})


def test_a_learned_drafter_whose_weights_were_lost_gets_back_what_it_was_given_last():  # field G1
    drafter = Learning()
    engine = engine_of(drafter, replace(WATCHED, checksums=False))
    engine.generate(requests("0"))
    engine.load_drafter_weights(1, {"gate": torch.tensor([1.0, 5.0, 5.0])})
    engine.load_weights(1, moved(1))
    healthy = engine.stats().canary_acceptance
    drafter.gate.zero_()
    engine.load_weights(2, moved(2))
    assert engine.stats().events == {"drafter_lost": 1, "drafter_reloaded": 1}
    assert drafter.gate.tolist() == [1.0, 5.0, 5.0]
    assert engine.stats().canary_acceptance > healthy / 2 > 0
    drafted = engine.stats().tokens_drafted
    engine.generate(requests("1"))
    assert engine.stats().tokens_drafted > drafted


def test_a_refit_that_overwrites_a_learned_drafter_is_told_by_the_name_of_the_weight(caplog):  # field G2
    drafter = Learning()
    engine = engine_of(drafter, replace(WATCHED, canaries=0))
    engine.generate(requests("0"))
    load = engine._runner.load_weights
    engine._runner.load_weights = lambda tensors, expected: (load(tensors, expected), drafter.gate.add_(1e-7))
    engine.load_weights(1, moved(1))
    assert engine.stats().events == {"drafter_overwritten": 1, "drafter_reloaded": 1}
    assert "drafter_overwritten: gate of the drafter changed" in caplog.text
    assert drafter.gate.tolist() == [1.0, 1.0, 1.0]


def test_a_learned_drafter_that_is_not_trained_on_is_stale_until_it_is():  # field G5
    drafter = Learning()
    engine = engine_of(drafter, replace(WATCHED, gap=1, canaries=0))
    for version in (1, 2):
        engine.load_weights(version, moved(version))
    assert engine.stats().events == {"drafter_stale": 1, "drafter_reloaded": 1}
    engine.load_drafter_weights(2, {"gate": torch.ones(3)})
    engine.load_weights(3, moved(3))
    engine.load_weights(4, moved(4))
    stats = engine.stats()
    assert (stats.events["drafter_stale"], stats.weight_version, stats.drafter_version) == (2, 4, 2)


def test_new_weights_of_a_draft_model_in_the_middle_of_requests_change_what_it_drafts_and_no_token(saved):
    def run(drafter, at=None):
        engine = engine_of(drafter)
        engine.submit(requests("0"))
        accepted, done = [], []
        while engine.busy:
            if len(accepted) == at:
                engine.load_drafter_weights(1, dict(tiny().named_parameters()))
            before = engine.stats().tokens_accepted
            done += engine.step()
            accepted.append(engine.stats().tokens_accepted - before)
        return {r.request_id: r.tokens.tolist() for r in done}, accepted, engine

    plain, _, _ = run(None)
    drafter = DraftModelDrafter(tiny(seed=9), PolicyTraits(vocabulary_size=VOCABULARY, run_seed=0))
    tokens, accepted, engine = run(drafter, at=2)
    assert tokens == plain
    assert sum(accepted[2:4]) > 3 * sum(accepted[:2])
    assert engine.stats().drafter_version == 1
    with torch.no_grad():
        drafter.model.lm_head.weight.zero_()
    assert drafter.reload()
    assert torch.equal(drafter.model.lm_head.weight, tiny().lm_head.weight)
    with pytest.raises(WeightsError, match=r"lacks lm_head\.weight"):
        engine.load_drafter_weights(2, {k: v for k, v in drafter.weights.items() if k != "lm_head.weight"})
    assert engine.stats().drafter_version == 1
