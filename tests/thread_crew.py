"""Workers of a fleet as threads of this process, with real engines, that die, hang and fail when a test says so."""

import threading

from paceline.config import BudgetConfig, EngineConfig
from paceline.drafters.history import HistoryDrafter
from paceline.engines.hf import HFEngine
from paceline.rl.cluster.crew import Lost
from paceline.rl.cluster.transport import TransportError
from paceline.rl.cluster.worker import RolloutWorker
from paceline.rl.fleet import Weights
from paceline.schema import PacelineError
from tiny_models import tiny

SLOTS = 2
_SEEDING = threading.Lock()  # torch has one source of random numbers for all threads


def a_model(seed=0):
    """A tiny model in float64, the same in every thread."""
    with _SEEDING:
        return tiny(seed=seed)


def an_engine(seed=0):
    """A tiny engine that remembers what it said."""
    budget = BudgetConfig(mode="fixed")
    drafter, config = HistoryDrafter(), EngineConfig(slots=SLOTS)
    return HFEngine(a_model(seed), drafter=drafter, budget=4, budget_config=budget, config=config)


class ThreadSender:
    """Weights as copies; ``released`` lists versions that are gone, and ``again`` may be needed for some."""

    def __init__(self):
        self.events, self.held, self.released, self.resent = {}, {}, [], []
        self.unreachable = set()

    def send(self, weights):
        policy = {name: tensor.clone() for name, tensor in weights.policy.items()}
        self.held[weights.version] = Weights(weights.version, policy)
        return weights.version, weights.version not in self.unreachable

    def again(self, version):
        self.resent.append(version)
        return version, True

    def receive(self, parcel):
        version, arrives = parcel
        if not arrives:
            raise TransportError(f"weights of version {version} are lost")
        return self.held[version]

    def release(self, version):
        self.released.append(version)
        del self.held[version]

    def close(self):
        self.held.clear()


class Gate:
    """Holds an engine up before a step once ``steps`` were made; ``reached`` is set when it stands there."""

    def __init__(self, steps):
        self.steps, self.reached, self.opened = steps, threading.Event(), threading.Event()

    def pass_through(self):
        if self.steps == 0:
            self.reached.set()
            self.opened.wait(60)
        else:
            self.steps -= 1


class ThreadHand:
    """Implements ``crew.Hand``. While it is ``mute`` its reports are held back; ``speak`` posts them."""

    def __init__(self, make, receive, seat, post):
        self.worker = RolloutWorker(make, role=seat, receive=receive)
        self.seat, self.post, self.held_back, self.mute = seat, post, [], False
        self.is_dead = False
        self.absorbed = []
        self._asked = threading.Semaphore(0)
        threading.Thread(target=self._report, daemon=True).start()

    def submit(self, requests):
        self.worker.submit(requests)

    def load(self, parcel, *, interrupt=False):
        self.worker.load(parcel, interrupt=interrupt)

    def absorb(self, rollouts):
        self.absorbed += rollouts
        self.worker.absorb(rollouts)

    def ask(self):
        self._asked.release()

    def die(self):
        """As if its process had been killed."""
        self.is_dead = True
        self.post(Lost("its process has died"))

    def speak(self):
        """What it has to say, however late."""
        self.mute = False
        for report in self.held_back:
            self.post(report)

    def close(self):
        pass

    def kill(self):
        self.is_dead = True
        self._asked.release()
        if not self.mute:  # what hangs cannot be ended either
            threading.Thread(target=self.worker.close, daemon=True).start()

    def _report(self):
        while True:
            self._asked.acquire()
            if self.is_dead and not self.mute:
                return
            report = self.worker.collect(0.05)
            if self.mute:
                self.held_back.append(report)
            elif not self.is_dead:
                self.post(report)


class ThreadCrew:
    """Implements ``crew.Crew``. ``gates`` hold the next worker of a seat up, ``before_step`` may raise.

    Workers that are ``is_mute`` never say a word.
    """

    def __init__(self, sender, make=an_engine, is_mute=False):
        self.sender, self.make, self.gates, self.before_step, self.is_mute = sender, make, {}, None, is_mute
        self.hands = []
        self.is_gone = self.is_closed = False

    def hire(self, seat, post):
        gate = self.gates.pop(seat, None)

        def make():
            engine = self.make()
            step = engine.step

            def gated():
                if self.before_step is not None:
                    self.before_step(engine)
                if gate is not None and engine.busy:
                    gate.pass_through()
                return step()

            engine.step = gated
            return engine

        hand = ThreadHand(make, self.sender.receive, seat, post)
        hand.mute = self.is_mute
        self.hands.append(hand)
        return hand

    def of(self, seat):
        """The workers that sat there, the first one first."""
        return [hand for hand in self.hands if hand.seat == seat]

    def why_absent(self, seat):
        return f"nobody came for {seat}"

    def check(self):
        if self.is_gone:
            raise PacelineError("whoever hires is gone")

    def close(self):
        self.is_closed = True
        for hand in self.hands:
            hand.mute = False
            hand.kill()
