"""A fleet whose workers die, hang, fail and come back: the tokens are those of one engine, each exactly once."""

import time

import pytest
import torch

from paceline.config import ClusterConfig, RLConfig
from paceline.rl.cluster.supervise import Supervisor
from paceline.rl.fleet import Order, Weights
from paceline.schema import PacelineError, RolloutRequest, SamplingParams, as_tokens
from thread_crew import SLOTS, Gate, ThreadCrew, ThreadSender, a_model, an_engine

SECONDS = 60


class Clock:
    """Time that passes when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def fleet_of():
    """Makes fleets of threads; they are closed at the end."""
    fleets = []

    def make(
        workers=2, *, rl=None, clock=time.monotonic, gates=None, engine=an_engine, remembers=True, mute=False, **cluster
    ):
        sender = ThreadSender()
        crew = ThreadCrew(sender, engine, mute)
        crew.gates = gates or {}
        config = ClusterConfig(kind="ray", rollout_workers=workers, **{"ahead": 1, "share_seconds": 0.0, **cluster})
        rl = RLConfig(**(rl or {}))
        fleet = Supervisor(crew, sender, config, rl, slots=SLOTS, remembers=remembers, clock=clock)
        fleets.append((fleet, crew))
        return fleet, crew, sender

    yield make
    for fleet, crew in fleets:
        for gate in crew.gates.values():
            gate.opened.set()
        fleet.close()
        assert crew.is_closed


def weights(version, seed=None):
    model = a_model(version if seed is None else seed)
    return Weights(version, {name: tensor.detach() for name, tensor in model.named_parameters()})


def orders(count=4, size=3, *, version=0, step=0, tokens=16, prompts=None):
    """``count`` orders of ``size`` siblings; those of equal prompts share history."""
    made = []
    for number in range(count):
        group = f"{step}/p{number}"
        prompt = as_tokens([1 + (number if prompts is None else number % prompts), 2, 3])
        requests = [
            RolloutRequest(
                request_id=f"{group}/{sample}",
                prompt=prompt,
                params=SamplingParams(max_tokens=tokens, seed=1000 * step + 10 * number + sample),
                group=group,
            )
            for sample in range(size)
        ]
        made.append(Order(step=step, group=group, version=version, requests=requests))
    return made


def by_one_engine(given, seed=0):
    """The rollouts of orders, decoded plainly in this thread by the weights of ``seed``."""
    engine = an_engine(seed)
    with engine.plain():
        return {r.request_id: r for r in engine.generate([r for order in given for r in order.requests])}


def until(holds, step=lambda: time.sleep(0.02)):
    """Wait until something holds, doing ``step`` in between."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        step()


def collect(fleet, count):
    """``count`` rollouts by id, each of them once."""
    found = {}
    end = time.monotonic() + SECONDS
    while len(found) < count:
        for rollout in fleet.collect(0.1):
            assert rollout.request_id not in found, "it came twice"
            found[rollout.request_id] = rollout
        assert time.monotonic() < end, f"{len(found)} of {count} came: {fleet.stats().events}"
    assert fleet.collect(0.0) == []
    return found


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, rollout in found.items():
        assert rollout.tokens.tolist() == expected[name].tokens.tolist(), name
        # Rows of other batches round otherwise.
        torch.testing.assert_close(torch.tensor(rollout.logprobs), torch.tensor(expected[name].logprobs))


def test_a_fleet_gives_the_tokens_of_one_engine_for_each_version(fleet_of):
    fleet, _, sender = fleet_of(rl={"max_age_steps": 1})
    fleet.begin(weights(0))
    old = orders()
    fleet.submit(old)
    fleet.publish(weights(1))
    new = orders(version=1, step=1)
    fleet.submit(new)
    found = collect(fleet, 24)
    same({name: r for name, r in found.items() if name.startswith("0/")}, by_one_engine(old))
    same({name: r for name, r in found.items() if name.startswith("1/")}, by_one_engine(new, seed=1))
    assert all(order.begun == order.version for order in (*old, *new))
    for version in (2, 3):
        fleet.publish(weights(version))
    fleet.submit(orders(1, version=3, step=3))
    collect(fleet, 3)
    assert sender.released == [0, 1]
    stats = fleet.stats()
    assert stats.tokens_emitted == 27 * 16
    assert (stats.weight_version, stats.events) == (3, {})
    assert {span.role for span in fleet.spans()} == {"worker-0", "worker-1"}


def test_a_killed_worker_is_replaced_and_its_requests_are_answered_all_the_same(fleet_of):
    # field G11
    gate = Gate(steps=5)
    fleet, crew, _ = fleet_of(gates={"worker-0": gate})
    fleet.begin(weights(0))
    given = orders(6)
    fleet.submit(given)
    assert gate.reached.wait(SECONDS)
    crew.of("worker-0")[0].die()
    gate.opened.set()
    same(collect(fleet, 18), by_one_engine(given))
    events = fleet.stats().events
    assert events["worker_lost"] == 1
    assert 1 <= events["requests_retried"] <= SLOTS + 1
    assert "rollouts_late" not in events


def test_a_hung_worker_is_replaced_and_what_it_says_later_is_dropped(fleet_of):
    clock, gate = Clock(), Gate(steps=0)
    fleet, crew, _ = fleet_of(gates={"worker-1": gate}, clock=clock, hang_seconds=1000.0)
    fleet.begin(weights(0))
    given = orders(6)
    fleet.submit(given)
    assert gate.reached.wait(SECONDS)
    (hung,) = crew.of("worker-1")
    hung.mute = True

    def pass_time():
        clock.now += 60.0
        time.sleep(0.1)

    until(lambda: len(crew.of("worker-1")) > 1, pass_time)
    same(collect(fleet, 18), by_one_engine(given))
    gate.opened.set()
    until(lambda: sum(len(report.rollouts) for report in hung.held_back) == SLOTS, hung.ask)
    hung.speak()
    until(lambda: fleet.stats().events.get("rollouts_late", 0) >= SLOTS)
    assert fleet.collect(0.0) == []
    assert fleet.stats().events["worker_hung"] >= 1


def test_a_worker_that_fails_is_replaced(fleet_of):
    fleet, crew, _ = fleet_of()
    failed = []

    def once(engine):
        if engine.busy and not failed:
            failed.append(engine)
            raise ZeroDivisionError("a cosmic ray")

    crew.before_step = once
    fleet.begin(weights(0))
    given = orders()
    fleet.submit(given)
    same(collect(fleet, 12), by_one_engine(given))
    assert fleet.stats().events["worker_lost"] == 1


def test_a_request_that_makes_one_worker_after_the_other_fail_ends_the_run_and_is_named(fleet_of):
    fleet, crew, _ = fleet_of()

    def poisoned(engine):
        if any(row.request_id == "0/p1/2" for row in engine._queue.running):
            raise PacelineError("request 0/p1/2: it is poisoned")

    crew.before_step = poisoned
    fleet.begin(weights(0))
    fleet.submit(orders())
    with pytest.raises(PacelineError, match="request 0/p1/2 makes one worker after the other fail: request 0/p1/2: it"):
        collect(fleet, 12)
    with pytest.raises(PacelineError, match="0/p1/2"):
        fleet.submit(orders(step=1))


def test_workers_that_keep_dying_end_the_run(fleet_of):
    fleet, crew, _ = fleet_of(1, restarts=2)

    def deadly(engine):
        if engine.busy:
            crew.hands[-1].die()

    crew.before_step = deadly
    fleet.begin(weights(0))
    fleet.submit(orders())
    message = "cluster.restarts=2: 3 workers were lost with nothing finished in between, the last one worker-0: its pro"
    with pytest.raises(PacelineError, match=message):
        collect(fleet, 12)


def test_a_worker_that_cannot_be_built_ends_the_run_at_once(fleet_of):
    def broken():
        raise FileNotFoundError("no model at nowhere")

    fleet, crew, _ = fleet_of(engine=broken)
    with pytest.raises(PacelineError, match=r"worker-\d cannot start: FileNotFoundError: no model at nowhere"):
        fleet.collect(SECONDS)
    assert len(crew.hands) == 2


def test_a_worker_that_never_starts_is_named(fleet_of):
    clock = Clock()
    fleet, crew, _ = fleet_of(1, clock=clock, hang_seconds=1000.0, mute=True)
    until(lambda: crew.hands)
    clock.now += 200.0
    with pytest.raises(PacelineError, match="worker-0 has not started in 120 s: nobody came for worker-0"):
        fleet.collect(SECONDS)


def test_the_run_ends_where_no_worker_can_be_hired_any_more(fleet_of):
    clock = Clock()
    fleet, crew, _ = fleet_of(clock=clock)
    crew.is_gone = True
    clock.now += 6.0
    with pytest.raises(PacelineError, match="whoever hires is gone"):
        fleet.collect(SECONDS)


def test_weights_that_do_not_arrive_are_sent_again(fleet_of):
    fleet, _, sender = fleet_of()
    sender.unreachable = {0}
    fleet.begin(weights(0))
    given = orders()
    fleet.submit(given)
    same(collect(fleet, 12), by_one_engine(given))
    assert sender.resent == [0, 0]
    assert fleet.stats().events == {}


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
def test_newer_weights_reach_requests_in_flight(fleet_of, in_flight):
    # field G11
    gates = {"worker-0": Gate(steps=4), "worker-1": Gate(steps=4)}
    fleet, _, _ = fleet_of(rl={"max_age_steps": 1, "in_flight": in_flight}, gates=dict(gates))
    fleet.begin(weights(0))
    given = orders()
    fleet.submit(given)
    assert all(gate.reached.wait(SECONDS) for gate in gates.values())
    fleet.publish(weights(1))
    time.sleep(0.3)  # the workers are told while they stand still
    for gate in gates.values():
        gate.opened.set()
    found = collect(fleet, 12)
    versions = [rollout.versions.tolist() for rollout in found.values()]
    assert all(each == sorted(each) and len(each) == 16 for each in versions)
    assert any(each[0] == 0 and each[-1] == 1 for each in versions)
    assert all(rollout.finish_reason == "length" for rollout in found.values())
    for order in given:
        assert order.begun <= min(min(found[r.request_id].versions) for r in order.requests)


def test_a_replaced_worker_gets_the_history_of_its_prompts_and_others_get_the_news(fleet_of):
    fleet, crew, _ = fleet_of(share_seconds=0.01)
    fleet.begin(weights(0))
    fleet.submit(orders(6, prompts=6))
    found = collect(fleet, 18)
    first = {seat: crew.of(seat)[0] for seat in ("worker-0", "worker-1")}
    until(lambda: sum(len(hand.absorbed) for hand in first.values()) == 18)
    heard = {seat: sorted(tuple(r.tokens) for r in hand.absorbed) for seat, hand in first.items()}
    said = sorted(tuple(r.tokens) for r in found.values())
    assert sorted(heard["worker-0"] + heard["worker-1"]) == said, "each hears what the other one said"
    first["worker-0"].die()
    until(lambda: len(crew.of("worker-0")) == 2 and len(crew.of("worker-0")[1].absorbed) == 18)
    fresh = crew.of("worker-0")[1]
    assert sorted(tuple(r.tokens) for r in fresh.absorbed) == said
    again = orders(6, prompts=6, step=0)
    fleet.submit(again)
    before = fleet.stats().tokens_accepted
    same(collect(fleet, 18), by_one_engine(again))
    assert fleet.stats().tokens_accepted - before > 18 * 8, "most was drafted from what was said before"


def test_history_survives_in_a_snapshot(fleet_of):
    fleet, _, _ = fleet_of()
    fleet.begin(weights(0))
    fleet.submit(orders())
    found = collect(fleet, 12)
    snapshot = fleet.history_snapshot()
    other, crew, _ = fleet_of()
    other.restore_history(snapshot)
    other.begin(weights(0))
    other.submit(orders(1))
    collect(other, 3)
    absorbed = [tuple(r.tokens) for hand in crew.hands for r in hand.absorbed]
    assert sorted(absorbed) == sorted(tuple(r.tokens) for r in found.values())
    assert fleet_of(remembers=False)[0].history_snapshot() is None
