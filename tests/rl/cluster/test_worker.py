"""A rollout worker in this process: order of its calls, weights in one transaction, failures, spans, history."""

import threading
import time
from itertools import pairwise

import pytest
import torch
from msgspec.structs import replace

from paceline.drafters import HistoryDrafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.hf import HFEngine
from paceline.forward.runner import WeightsError
from paceline.rl.cluster import worker as worker_module
from paceline.rl.cluster.transport import TransportError
from paceline.rl.cluster.worker import RolloutWorker
from paceline.rl.fleet import Weights
from soft_drafting import SEED, engine_of, near, requests, run, traits
from tiny_models import tiny


@pytest.fixture
def model():
    return tiny()


def weights(model, version, **parts):
    return Weights(version, dict(model.named_parameters()), **parts)


def copied(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class Gated(HFEngine):
    """Makes a pass only where it is let, so that what comes between passes is known."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gate = threading.Semaphore(0)
        self.waits = threading.Event()
        self.broken = False

    def step(self):
        if self._queue.running or self._queue.waiting:
            self.waits.set()
            assert self.gate.acquire(timeout=30)
        if self.broken:
            raise ArithmeticError("no more\nnumbers")
        return super().step()


def gated(model, drafter=None):
    return Gated(model, drafter=drafter, seed=SEED, eos_ids=())


def gather(worker, count, until=lambda report: False):
    """Rollouts by id, and the reports that they came with."""
    found, reports, deadline = {}, [], time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        reports.append(worker.collect(1.0))
        for rollout in reports[-1].rollouts:
            assert rollout.request_id not in found
            found[rollout.request_id] = rollout
        if reports[-1].failure or until(reports[-1]):
            break
    return found, reports


def failure(worker):
    _, reports = gather(worker, 1 << 30)
    worker.close()
    return reports[-1].failure


def test_it_decodes_what_the_engine_would_with_the_same_counts(model):
    asked = requests()
    whole, stats = run(model, asked)
    worker = RolloutWorker(lambda: engine_of(model), role="worker-3")
    assert worker.collect(0.0).version == -1
    worker.load(weights(model, 4))
    for request in asked:
        worker.submit([request])
    found, reports = gather(worker, len(asked))
    last = worker.collect(0.0)
    worker.close()
    assert [found[rollout.request_id].tokens.tolist() for rollout in whole] == [r.tokens.tolist() for r in whole]
    assert {version for rollout in found.values() for version in rollout.versions} == {4}
    assert (last.version, last.in_flight, last.failure) == (4, 0, None)
    assert last.stats.tokens_emitted == stats.tokens_emitted
    assert last.passes >= last.stats.forwards > 0
    assert [r.passes for r in reports] == sorted(r.passes for r in reports)


def test_weights_and_requests_keep_their_order_and_requests_in_flight_go_on(model):
    first, second = (
        requests(2, 12),
        [replace(request, request_id=f"{request.request_id}/b") for request in requests(2, 12)],
    )
    engine = gated(near(model, 0))
    worker = RolloutWorker(lambda: engine)
    worker.load(weights(model, 1))
    worker.submit(first)
    engine.gate.release(4)
    while worker.collect(0.01).passes < 4:
        pass
    worker.load(weights(near(model, 0.05), 2))
    worker.submit(second)
    engine.gate.release(1000)
    found, _ = gather(worker, 4)
    worker.close()
    assert all(set(found[request.request_id].versions) == {2} for request in second)
    for request in first:
        versions = found[request.request_id].versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {1, 2}


def test_an_interrupt_hands_out_what_was_said_and_it_goes_on_by_the_new_weights(model):  # field G11
    asked = requests(6, 12)
    engine = gated(near(model, 0))
    worker = RolloutWorker(lambda: engine)
    worker.load(weights(model, 1))
    worker.submit(asked)
    engine.gate.release(4)
    while worker.collect(0.01).passes < 4:
        pass
    worker.load(weights(near(model, 0.05), 2), interrupt=True)
    engine.gate.release(1)
    aborted, reports = gather(worker, len(asked), until=lambda report: report.version == 2 and not report.in_flight)
    assert {rollout.finish_reason for rollout in aborted.values()} == {"abort"}
    assert {version for rollout in aborted.values() for version in rollout.versions} == {1}
    assert 0 < sum(len(rollout.tokens) for rollout in aborted.values()) < 6 * 12
    worker.submit([replace(request, begun=aborted[request.request_id]) for request in asked])
    engine.gate.release(1000)
    found, reports = gather(worker, len(asked))
    worker.close()
    for request in asked:
        begun, whole = aborted[request.request_id], found[request.request_id]
        count = len(begun.tokens)
        assert len(whole.tokens) == 12
        assert whole.tokens[:count].tolist() == begun.tokens.tolist()
        assert whole.versions.tolist() == [1] * count + [2] * (12 - count)
    assert reports[-1].stats.tokens_emitted == 6 * 12


def test_requests_before_any_weights_are_a_failure(model):
    worker = RolloutWorker(lambda: engine_of(model))
    worker.submit(requests(1))
    assert failure(worker) == "request r0 came before any weights; load those of its version first"


def test_what_the_engine_raises_ends_the_decoding_in_one_line(model):
    engine = gated(model)
    worker = RolloutWorker(lambda: engine)
    worker.load(weights(model, 1))
    worker.submit(requests(2))
    engine.broken = True
    engine.gate.release(1)
    _, reports = gather(worker, 2)
    assert reports[-1].failure == "ArithmeticError: no more numbers"
    worker.submit(requests(2))
    worker.load(weights(model, 2))
    again = worker.collect(30.0)
    assert (again.failure, again.version, again.in_flight) == (reports[-1].failure, 1, 2)
    worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(requests(1))


def test_an_engine_that_cannot_be_built_is_a_failure():
    def make():
        raise FileNotFoundError("no such policy")

    worker = RolloutWorker(make)
    assert failure(worker) == "FileNotFoundError: no such policy"


def drafting(model):
    return DraftModelDrafter(near(model, 0.1), traits())


def test_policy_and_drafter_move_in_one_transaction(model):
    drafter, engine = drafting(model), None

    def make():
        nonlocal engine
        engine = engine_of(near(model, 0), drafter)
        return engine

    newer = near(model, 0.3)
    worker = RolloutWorker(make)
    worker.load(weights(newer, 5, drafter=copied(newer), drafter_version=4))
    worker.submit(requests(2))
    _, reports = gather(worker, 2)
    worker.close()
    assert (reports[-1].stats.weight_version, reports[-1].stats.drafter_version) == (5, 4)
    assert all(torch.equal(drafter.weights[name], tensor) for name, tensor in copied(newer).items())


@pytest.mark.parametrize("unfit", ["policy", "drafter"])
def test_where_one_does_not_fit_neither_is_loaded(model, unfit):
    policy, drafter = near(model, 0), drafting(model)
    before, drafts_before = copied(policy), copied(near(model, 0.1))
    newer = {"policy": copied(near(model, 0.3)), "drafter": copied(near(model, 0.3))}
    name = sorted(newer[unfit])[-1]
    newer[unfit][name] = torch.zeros(2, 3, dtype=torch.float64)
    worker = RolloutWorker(lambda: engine_of(policy, drafter))
    worker.load(Weights(5, newer["policy"], newer["drafter"], 5))
    line = failure(worker)
    assert f"{name} has shape (2, 3), the {unfit}'s is" in line
    assert all(torch.equal(tensor, before[name]) for name, tensor in copied(policy).items())
    assert all(torch.equal(tensor, drafts_before[name]) for name, tensor in drafter.weights.items())


def test_checking_weights_loads_none(model):
    engine = engine_of(near(model, 0))
    before = copied(engine._runner.model)
    engine.check_weights(copied(near(model, 0.3)))
    with pytest.raises(WeightsError, match="lacks"):
        engine.check_weights({})
    assert all(torch.equal(tensor, before[name]) for name, tensor in copied(engine._runner.model).items())
    assert engine.version == 0
    engine.close()


def test_weights_that_did_not_arrive_hold_up_what_came_behind_them_until_they_are_sent_again(model):
    sent = []

    def receive(message):
        sent.append(message)
        if message == "torn":
            raise TransportError("weights of version 1: the file is gone")
        return message

    worker = RolloutWorker(lambda: engine_of(model), receive=receive)
    worker.load("torn")
    asked = requests(2)
    worker.submit(asked)
    _, reports = gather(worker, 1, until=lambda report: report.undelivered)
    assert reports[-1].undelivered == "weights of version 1: the file is gone"
    assert (reports[-1].version, reports[-1].in_flight, reports[-1].failure) == (-1, 2, None)
    whole = weights(near(model, 0), 1)
    worker.load(whole)
    found, reports = gather(worker, 2)
    worker.close()
    assert {version for rollout in found.values() for version in rollout.versions} == {1}
    assert reports[-1].undelivered is None
    assert sent == ["torn", whole]


def test_spans_cover_all_of_the_time_and_name_what_was_done(model):
    started = time.time()
    worker = RolloutWorker(lambda: engine_of(model), role="worker-7")
    worker.load(weights(model, 1))
    worker.submit(requests(4))
    _, reports = gather(worker, 4)
    spans = [span for report in reports for span in report.spans]
    time.sleep(0.05)
    spans += worker.collect(0.0).spans
    ended = time.time()
    worker.close()
    assert {span.role for span in spans} == {"worker-7"}
    assert {span.doing for span in spans} == {"load", "decode", "idle"}
    assert {span.version for span in spans if span.doing == "decode"} == {1}
    assert all(span.seconds > 0 for span in spans)
    assert all(abs(a.start + a.seconds - b.start) < 1e-6 for a, b in pairwise(spans))
    assert started <= spans[0].start
    assert spans[-1].start + spans[-1].seconds <= ended
    assert spans[-1].doing == "idle"


def test_what_others_said_is_drafted_from_and_changes_no_token(model):
    asked = requests(6, 20)
    whole, _ = run(model, asked)
    accepted = []
    for others in ([], whole):
        worker = RolloutWorker(lambda: engine_of(model, HistoryDrafter(salt=1)))
        worker.load(weights(near(model, 0), 1))
        worker.absorb(others)
        worker.submit(
            [
                replace(
                    request, request_id=f"{request.request_id}/again", params=replace(request.params, seed=request.seed)
                )
                for request in asked
            ]
        )
        found, reports = gather(worker, len(asked))
        worker.close()
        assert [found[f"{r.request_id}/again"].tokens.tolist() for r in whole] == [r.tokens.tolist() for r in whole]
        accepted.append(reports[-1].stats.tokens_accepted)
    assert accepted[1] > accepted[0]


def test_batches_of_history_that_pile_up_are_dropped_and_counted(model, monkeypatch):
    monkeypatch.setattr(worker_module, "_MOST_PORTIONS", 64)
    asked = requests(1, 4)
    whole, _ = run(model, asked)
    engine = gated(near(model, 0), HistoryDrafter(salt=1))
    worker = RolloutWorker(lambda: engine)
    worker.load(weights(model, 1))
    worker.submit(asked)
    assert engine.waits.wait(30)
    for number in range(200):
        worker.absorb([replace(whole[0], request_id=str(number))])
    engine.gate.release(1000)
    _, reports = gather(worker, 1)
    worker.close()
    assert reports[-1].stats.events["history_batches_dropped"] == 200 - 64


def test_closing_ends_the_thread_and_the_engine_in_the_middle_of_requests(model):
    engine = gated(model)
    worker = RolloutWorker(lambda: engine)
    worker.load(weights(model, 1))
    worker.submit(requests(2))
    engine.gate.release(1000)
    worker.close()
    assert not worker._thread.is_alive()
    report = worker.collect(60.0)
    assert report.failure is None
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(requests(1))
