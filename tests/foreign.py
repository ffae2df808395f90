"""An engine that is not ours, as a follower sees it: rows, lengths, tokens, what was emitted and verified."""

from types import SimpleNamespace

import numpy as np

from paceline.drafters.follower import Batch, Follower, Introduced
from paceline.schema import Draft, EngineStats, RolloutRequest, SamplingParams, as_tokens

STOP = 0
VOCABULARY = 64
_WIDTH = 640


class Identity:
    """What an engine holds of a request; comparing it may be dear or fail."""

    def __eq__(self, other):
        raise AssertionError("identities are compared with `is` only")

    __hash__ = None


class Job:
    """One life of a request and all that the policy will say: ``answer`` to its end, ``beyond`` it never heard.

    ``limits`` are the SamplingParams that end the answer where it ends, the rest are fields of the RolloutRequest.
    ``shown`` counts the tokens that the follower has seen, ``hidden`` the last ones it cannot see yet.
    """

    def __init__(self, name, prompt, answer, beyond=(), limits=None, **fields):
        self.name = name
        self.prompt = list(prompt)
        self.answer = list(answer)
        self.beyond = list(beyond)
        self.params = SamplingParams(**{"max_tokens": 10_000} | (limits or {}))
        self.fields = {"request_id": name} | fields
        self.identity = Identity()
        self.said = []
        self.draft = []
        self.filled = self.hidden = 0
        self.shown = 0

    @property
    def total(self):
        return len(self.prompt) + len(self.said)

    @property
    def is_done(self):
        return len(self.said) >= len(self.answer)


class ForeignEngine:
    """Decodes known answers, at most ``fill`` tokens of a prompt a pass. Ends are only noticed after the pass."""

    def __init__(self, fill=1 << 30):
        self.follower = None
        self.fill = fill
        self.jobs = {}  # alive, in the batch or not
        self.rows = []
        self.seen = []  # by the follower, in order
        self.last = {}  # by request: what the last pass verified, and how many of it were right

    def introduce(self, name):
        job = self.jobs[name]
        request = RolloutRequest(prompt=as_tokens(job.prompt), params=job.params, **job.fields)
        return Introduced(request=request, stop_ids=(STOP,))

    def admit(self, job):
        self.jobs[job.name] = job
        self.rows.append(job)

    def preempt(self, job):
        self.rows.remove(job)
        job.filled, job.draft = 0, []

    def resume(self, job):
        self.rows.append(job)

    def abort(self, job):
        del self.jobs[job.name]
        if job in self.rows:
            self.rows.remove(job)

    def step(self, asks=True, trim=1 << 30):
        """One pass; without ``asks`` the follower hears nothing of it, ``trim`` is the most verified of a draft."""
        emitted, verified = [], []
        self.last = {}
        for job in self.rows:
            job.filled += min(self.fill, job.total - job.filled)
            said, right, draft = [], 0, job.draft[:trim]
            if job.filled < job.total:
                draft = []
            else:
                ahead = [*job.answer, *job.beyond][len(job.said) :]
                while right < min(len(draft), len(ahead) - 1) and draft[right] == ahead[right]:
                    right += 1
                said = ahead[: right + 1]
            job.said += said
            job.filled += right
            emitted.append(said)
            verified.append(len(draft))
            self.last[job.name] = draft, right
        chains = self.ask(emitted, verified) if asks else [[] for _ in self.rows]
        for job, chain in zip(self.rows, chains, strict=True):
            job.draft = chain
            job.hidden = 0
        done = [job for job in self.rows if job.is_done]
        for job in done:
            self.abort(job)
        return done

    def ask(self, emitted, verified):
        """What the follower drafts after a pass."""
        count = len(self.rows)
        tokens = np.full((count + 1, _WIDTH), -7, dtype=np.int32)
        lengths = np.full(count + 1, 99, dtype=np.int32)
        for index, job in enumerate(self.rows):
            tokens[index, : job.total] = job.prompt + job.said
            job.hidden = min(job.hidden, len(job.said))
            tokens[index, job.total - job.hidden : job.total] = -1
            lengths[index] = job.total
            if job not in self.seen:
                self.seen.append(job)
            if not job.hidden:
                job.shown = len(job.said)
        names, identities = [job.name for job in self.rows], [job.identity for job in self.rows]
        return self.follower.propose(Batch(names, identities, tokens, lengths, emitted, verified), self.jobs)

    def run(self, **options):
        """Passes until no row is left; how many they were."""
        passes = 0
        while self.rows:
            self.step(**options)
            passes += 1
        return passes


def following(drafter, controller=None, *, budget=8, context=500, vocabulary=VOCABULARY, stats=None, **options):
    """A foreign engine with a follower in it."""
    engine = ForeignEngine(**options)
    engine.follower = Follower(
        drafter,
        controller,
        budget=budget,
        context=context,
        vocabulary=vocabulary,
        introduce=engine.introduce,
        stats=stats or EngineStats(events={}),
    )
    return engine


class Listener:
    """Drafts what ``script(request, response)`` says, and insists on the order of the seam's calls."""

    def __init__(self, script=lambda request, response: []):
        self.script = script
        self.live = {}
        self.heard = []
        self.version = 0
        self.asked = []

    def start(self, requests):
        for request in requests:
            assert request.request_id not in self.live
            life = SimpleNamespace(request=request, tokens=[], rollout=None, outcomes=[], versions=[])
            self.live[request.request_id] = life
            self.heard.append(life)

    def propose(self, request_ids, budget):
        self.asked.append(list(request_ids))
        drafts = []
        for name in request_ids:
            life = self.live[name]
            draft = self.script(life.request, list(life.tokens))
            if not isinstance(draft, Draft):
                draft = Draft(request_id="", tokens=as_tokens(draft), length=-1, version=self.version)
            draft.request_id = name
            if draft.length < 0:
                draft.length = len(life.request.prompt) + len(life.tokens)
            drafts.append(draft)
        return drafts

    def commit(self, outcomes):
        for outcome in outcomes:
            life = self.live[outcome.request_id]
            assert len(outcome.tokens)
            assert outcome.accepted <= min(outcome.drafted, len(outcome.tokens))
            life.tokens += outcome.tokens.tolist()
            life.outcomes.append(outcome)
            life.versions += [self.version] * len(outcome.tokens)

    def finish(self, rollouts):
        for rollout in rollouts:
            self.live.pop(rollout.request_id).rollout = rollout

    def on_weights(self, version):
        self.version = version

    def of(self, name):
        """The lives of a request id."""
        return [life for life in self.heard if life.request.request_id == name]


def answer(prompt=0, length=60):
    """Tokens that say nothing about one another, and a stop."""
    return [*np.random.default_rng(prompt).integers(1, VOCABULARY, length).tolist(), STOP]


def knowing(jobs, wrong=()):
    """A script that drafts what comes next, wrong at the positions in ``wrong``."""

    def script(request, response):
        ahead = jobs[request.request_id].answer[len(response) :]
        return [63 - t if len(response) + i in wrong else t for i, t in enumerate(ahead)][:8]

    return script


def oracle(**options):
    """An engine whose drafter knows the answers of its jobs."""
    listener = Listener()
    engine = following(listener, **options)
    listener.script = knowing(engine.jobs)
    return engine, listener
