"""Who decodes what: each request is answered once, by its version, near its prompt's history, and nobody starves."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline.rl.cluster.dispatch import Dispatcher
from paceline.schema import PacelineError
from simulated_workers import SimulatedWorker, an_order

QUICK = settings(max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))


class World(RuleBasedStateMachine):
    """Random orders, publications, answers, deaths, late and doubled answers, in any order."""

    in_flight = "wait"

    @initialize(workers=st.integers(1, 4), slots=st.integers(1, 3), ahead=st.integers(0, 2), window=st.integers(0, 2))
    def start(self, workers, slots, ahead, window):
        self.dispatcher = Dispatcher(slots=slots, ahead=ahead, in_flight=self.in_flight, window=window)
        self.most = slots + ahead
        self.version = 0
        self.dispatcher.publish(0)
        self.alive, self.dead, self.empty = {}, {}, []
        for index in range(workers):
            self.hire(f"worker-{index}")
        self.wanted, self.delivered, self.ghosts, self.orders = {}, {}, [], 0
        self.late = 0

    def hire(self, seat):
        number = self.dispatcher.join(seat)
        self.alive[number] = SimulatedWorker(number)

    def take(self, number, rollouts, fresh=True):
        for rollout in self.dispatcher.finish(number, rollouts):
            assert fresh, "a dead worker's answer was delivered"
            assert rollout.request_id not in self.delivered, "delivered twice"
            self.delivered[rollout.request_id] = rollout

    def tell(self):
        for assignment in self.dispatcher.assign():
            self.alive[assignment.worker].tell(assignment)

    @rule(size=st.integers(1, 5), prompt=st.integers(0, 5), back=st.integers(0, 2))
    def order(self, size, prompt, back):
        back = min(back, self.dispatcher.window) if self.in_flight == "wait" else 0
        order = an_order(f"o{self.orders}", size, prompt=prompt, version=max(0, self.version - back))
        self.orders += 1
        self.wanted |= {request.request_id: order for request in order.requests}
        self.dispatcher.submit([order])
        self.tell()

    @rule()
    def publish(self):
        self.version += 1
        self.dispatcher.publish(self.version)
        needed = self.dispatcher.needed()
        assert self.version in needed
        self.tell()
        open_versions = {order.version for name, order in self.wanted.items() if name not in self.delivered}
        assert self.in_flight != "wait" or open_versions <= needed

    @rule(data=st.data(), tell=st.booleans())
    def work(self, data, tell):
        able = [worker for worker in self.alive.values() if worker.inbox or worker.running]
        if able:
            self.one_turn(data.draw(st.sampled_from(able)), data.draw(st.integers(0, 10)))
            if tell:
                self.tell()

    def one_turn(self, worker, choice):
        if worker.inbox and (choice % 2 or not worker.running):
            self.take(worker.number, worker.turn())
            self.dispatcher.loaded(worker.number, worker.version)
        else:
            name = sorted(worker.running)[choice % len(worker.running)]
            rollout = worker.answer(name)
            self.take(worker.number, [rollout])
            self.ghosts.append((worker.number, rollout))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), again=st.booleans())
    def kill(self, data, again):
        number = data.draw(st.sampled_from(sorted(self.alive)))
        seat = self.dispatcher.seat(number)
        worker = self.dead[number] = self.alive.pop(number)
        returned = self.dispatcher.lost(number)
        assert len(returned) == worker.holds
        self.empty.append(seat)
        if again:
            self.hire(self.empty.pop(0))
        self.tell()

    @precondition(lambda self: self.empty)
    @rule()
    def come_back(self):
        self.hire(self.empty.pop(0))
        self.tell()

    @rule(data=st.data())
    def speak_late(self, data):
        """A worker thought dead answers after all, or an answer arrives a second time."""
        talkers = [worker for worker in self.dead.values() if worker.running]
        if talkers:
            worker = data.draw(st.sampled_from(talkers))
            self.take(worker.number, [worker.answer(min(worker.running))], fresh=False)
            self.late += 1
        elif self.ghosts:
            number, rollout = data.draw(st.sampled_from(self.ghosts))
            self.take(number, [rollout], fresh=False)
            self.late += 1

    @invariant()
    def few_at_a_time(self):
        for number, worker in getattr(self, "alive", {}).items():
            assert len(self.dispatcher.held(number)) <= self.most
            assert worker.holds <= self.most

    def teardown(self):
        if not hasattr(self, "dispatcher"):
            return
        if not self.alive:
            self.hire("worker-0")
        for _ in range(20 * len(self.wanted) + 100 * (self.version + 1)):
            self.tell()
            able = [worker for worker in self.alive.values() if worker.inbox or worker.running]
            if not able:
                break
            self.one_turn(able[0], 1)
        assert self.delivered.keys() == self.wanted.keys()
        assert self.dispatcher.outstanding == 0
        assert self.dispatcher.counts["rollouts_late"] == self.late
        assert not any(self.dispatcher.held(number) for number in self.alive)
        for name, rollout in self.delivered.items():
            order = self.wanted[name]
            assert rollout.finish_reason == "stop"
            assert min(rollout.versions) >= order.begun >= order.version
            if self.in_flight == "wait":
                assert set(rollout.versions) == {order.version}


class KeepWorld(World):
    in_flight = "keep"


class AbortWorld(World):
    in_flight = "abort"


@pytest.mark.parametrize("world", [World, KeepWorld, AbortWorld])
def test_every_request_is_answered_exactly_once_whatever_happens(world):
    # field G11
    run_state_machine_as_test(world, settings=QUICK)


def a_dispatcher(workers=3, **settings):
    dispatcher = Dispatcher(**{"slots": 4, "ahead": 2, **settings})
    dispatcher.publish(0)
    return dispatcher, [dispatcher.join(f"worker-{index}") for index in range(workers)]


def given_to(assignments):
    return {request.request_id: each.worker for each in assignments for request in each.requests}


def run_one_by_one(dispatcher, prompts, visit):
    """Which worker decodes each prompt where one order is there at a time."""
    decoded = {}
    for prompt in prompts:
        order = an_order(f"{visit}-{prompt}", 2, prompt=prompt)
        dispatcher.submit([order])
        spread = given_to(dispatcher.assign())
        (decoded[prompt],) = set(spread.values())
        worker = SimulatedWorker(decoded[prompt])
        worker.version = 0
        worker.running = {request.request_id: request for request in order.requests}
        assert len(dispatcher.finish(worker.number, [worker.answer(name) for name in spread])) == 2
    return decoded


@given(prompts=st.sets(st.integers(0, 10_000), min_size=1, max_size=12), victim=st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_a_prompt_stays_with_its_worker_and_only_those_of_a_lost_one_move(prompts, victim):
    dispatcher, numbers = a_dispatcher()
    first = run_one_by_one(dispatcher, prompts, "first")
    assert run_one_by_one(dispatcher, prompts, "second") == first
    dispatcher.lost(numbers[victim])
    without = run_one_by_one(dispatcher, prompts, "without")
    for prompt, worker in first.items():
        assert without[prompt] == worker or worker == numbers[victim]
    fresh = dispatcher.join(f"worker-{victim}")
    back = run_one_by_one(dispatcher, prompts, "back")
    assert back == {prompt: fresh if worker == numbers[victim] else worker for prompt, worker in first.items()}


def of_home(dispatcher, number, count):
    """``count`` prompts whose home is a worker."""
    own = (p for p in range(10_000) if dispatcher.home(an_order("x", prompt=p).requests[0].prompt_key) == number)
    return [next(own) for _ in range(count)]


def test_an_idle_worker_takes_whole_orders_and_then_single_requests():
    dispatcher, (first, second) = a_dispatcher(2, slots=2, ahead=0)
    dispatcher.submit([an_order(f"o{i}", 3, prompt=p) for i, p in enumerate(of_home(dispatcher, first, 2))])
    spread = given_to(dispatcher.assign())
    assert spread == {"o0/0": first, "o0/1": first, "o1/0": second, "o1/1": second}
    assert dispatcher.counts["orders_stolen"] == 1
    for name in ("o1/0", "o1/1"):
        request = next(
            request for _, request in dispatcher._workers[second].held.values() if request.request_id == name
        )
        worker = SimulatedWorker(second)
        worker.version, worker.running = 0, {name: request}
        dispatcher.finish(second, [worker.answer(name)])
    assert given_to(dispatcher.assign()) == {"o1/2": second, "o0/2": second}
    assert dispatcher.counts["requests_stolen"] == 1


def test_nothing_is_taken_from_a_worker_that_has_room():
    dispatcher, (first, _) = a_dispatcher(2, slots=1, ahead=3)
    dispatcher.submit([an_order(f"o{i}", 2, prompt=p) for i, p in enumerate(of_home(dispatcher, first, 2))])
    assert set(given_to(dispatcher.assign()).values()) == {first}


def test_a_worker_moves_to_the_next_version_only_when_its_own_is_done():
    dispatcher, (number,) = a_dispatcher(1, slots=4, window=1)
    dispatcher.submit([an_order("old", 1)])
    dispatcher.publish(1)
    dispatcher.submit([an_order("new", 1, version=1)])
    worker = SimulatedWorker(number)
    for assignment in dispatcher.assign():
        assert (assignment.load, given_to([assignment])) == (0, {"old/0": number})
        worker.tell(assignment)
    assert dispatcher.assign() == []
    worker.turn(), worker.turn()
    dispatcher.loaded(number, 0)
    assert [r.request_id for r in dispatcher.finish(number, [worker.answer("old/0")])] == ["old/0"]
    (assignment,) = dispatcher.assign()
    assert (assignment.load, given_to([assignment])) == (1, {"new/0": number})


def test_weights_are_needed_while_an_order_or_a_load_waits_for_them():
    dispatcher, (number,) = a_dispatcher(1)
    dispatcher.submit([an_order("old", 1)])
    dispatcher.assign()
    dispatcher.publish(1)
    dispatcher.publish(2)
    assert dispatcher.needed() == {0, 2}
    worker = SimulatedWorker(number)
    worker.version, worker.running = 0, {"old/0": an_order("old", 1).requests[0]}
    dispatcher.finish(number, [worker.answer("old/0")])
    assert dispatcher.needed() == {0, 2}, "it has not said that it is there"
    dispatcher.loaded(number, 0)
    assert dispatcher.needed() == {2}
    with pytest.raises(PacelineError, match="group late wants weights version 0, which nobody has"):
        dispatcher.submit([an_order("late", 1)])


def test_what_was_said_before_an_abort_is_carried_over():
    # field G11
    dispatcher, (number,) = a_dispatcher(1, in_flight="abort")
    dispatcher.submit([an_order("o", 2)])
    worker = SimulatedWorker(number)
    for assignment in dispatcher.assign():
        worker.tell(assignment)
    while worker.inbox:
        worker.turn()
    dispatcher.publish(1)
    (assignment,) = dispatcher.assign()
    assert (assignment.load, assignment.interrupt, assignment.requests) == (1, True, [])
    worker.tell(assignment)
    assert dispatcher.finish(number, worker.turn()) == []
    (assignment,) = dispatcher.assign()
    assert [(r.request_id, r.begun.versions.tolist()) for r in assignment.requests] == [("o/0", [0]), ("o/1", [0])]
    worker.tell(assignment)
    while worker.inbox:
        worker.turn()
    (done,) = dispatcher.finish(number, [worker.answer("o/0")])
    assert done.versions.tolist() == [0, 1]
    assert dispatcher.counts["requests_carried"] == 2


def test_an_abort_that_nobody_asked_for_ends_the_run():
    dispatcher, (number,) = a_dispatcher(1, in_flight="keep")
    dispatcher.submit([an_order("o", 1)])
    worker = SimulatedWorker(number)
    for assignment in dispatcher.assign():
        worker.tell(assignment)
    worker.turn(), worker.turn()
    worker.inbox.append((1, True))
    with pytest.raises(PacelineError, match="request o/0 was aborted by worker-0, which nobody asked for"):
        dispatcher.finish(number, worker.turn())


def test_ids_in_flight_are_unique():
    dispatcher, _ = a_dispatcher(1)
    dispatcher.submit([an_order("o", 1)])
    with pytest.raises(PacelineError, match="request o/0 is in flight already"):
        dispatcher.submit([an_order("o", 1)])
