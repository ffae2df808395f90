"""The follower under random schedules: whatever an engine does, a drafter hears the truth, once and in order."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from foreign import STOP, VOCABULARY, Job, Listener, following
from paceline.budget.controller import BudgetController
from paceline.budget.steptime import StepTimeTable
from paceline.config import BudgetConfig
from paceline.schema import CANARY, Draft, EngineStats, as_tokens

CONTEXT, BUDGET = 40, 6
NAMES = ("a", "b", "c", "d", f"{CANARY}e")

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["step"] * 8
            + ["admit"] * 4
            + ["silent", "trim", "hide", "preempt", "resume", "abort", "refit", "draft", "settle"]
        ),
        st.integers(0, 9),
    ),
    min_size=5,
    max_size=60,
)


def a_job(name, random):
    """A request of random length that ends by a stop, by its own limit, or by the context."""
    prompt = random.integers(1, VOCABULARY, random.integers(1, 7)).tolist()
    room = CONTEXT - len(prompt)
    end = random.choice(["stop", "length", "context"])
    length = room if end == "context" else int(random.integers(1, room))
    text = random.integers(1, VOCABULARY, length + 12).tolist()
    said, beyond = text[:length], text[length:]
    if end == "stop":
        said[-1] = STOP
    limits = {"max_tokens": length} if end == "length" else {}
    job = Job(name, prompt, said, beyond, limits=limits, speculate=bool(random.random() < 0.9))
    job.reason = "abort" if name.startswith(CANARY) else "stop" if end == "stop" else "length"
    return job


def a_script(jobs, random):
    """Drafts of every kind: right, half right, trees, for other lengths or versions, of impossible tokens."""

    def script(request, response):
        job = jobs[request.request_id]
        right = [*job.answer, *job.beyond][len(response) :][: int(random.integers(0, 9))]
        if right and random.random() < 0.5:
            at = int(random.integers(len(right)))
            right[at] = right[at] % (VOCABULARY - 1) + 1
        fields = {"request_id": "", "tokens": as_tokens(right), "length": -1}
        odd = random.choice(["no", "no", "no", "no", "tree", "length", "version", "vocabulary"])
        if odd == "tree":
            fields["parents"] = as_tokens([int(random.integers(-1, node)) for node in range(len(right))])
        elif odd == "length":
            fields["length"] = 1000
        elif odd == "version":
            fields["version"] = 1000
        elif odd == "vocabulary":
            fields["tokens"] = as_tokens([*right, VOCABULARY])
        fields.setdefault("version", job.version)
        return Draft(**fields)

    return script


class Schedule:
    """An engine under operations, and what must have been heard of each of its jobs."""

    def __init__(self, seed, fill, mode):
        self.random = np.random.default_rng(seed)
        stats = EngineStats(events={})
        self.controller = BudgetController(BudgetConfig(mode=mode), StepTimeTable(), stats)
        self.listener = Listener()
        self.engine = following(self.listener, self.controller, budget=BUDGET, context=CONTEXT, stats=stats, fill=fill)
        self.listener.script = a_script(self.engine.jobs, self.random)
        self.waiting = []
        self.version, self.is_drafting = 0, True
        self._spy()

    def _spy(self):
        """Whatever the budget is told of a draft is what the engine did with that very draft."""
        close = self.controller.close

        def told(plan, accepted, cut, *, emitted, seconds, is_clean=True):
            for draft, path, is_cut in zip(plan.drafts, accepted, cut, strict=True):
                verified, right = self.engine.last[draft.request_id]
                job = self.engine.jobs[draft.request_id]
                assert draft.tokens.tolist() == verified
                assert draft.version == self.version
                heard = min(right, len(job.answer) - (draft.length - len(job.prompt)))
                assert path.tolist() == list(range(heard))
                assert is_cut == (draft.length - len(job.prompt) + heard == len(job.answer))
            if is_clean:
                assert plan.rows == len(self.engine.rows)
            close(plan, accepted, cut, emitted=emitted, seconds=seconds, is_clean=is_clean)

        self.controller.close = told

    def do(self, operation, number):
        getattr(self, operation)(number)

    def admit(self, number):
        name = NAMES[number % len(NAMES)]
        if name not in self.engine.jobs and len(self.engine.rows) < 4:
            job = a_job(name, self.random)
            job.version = self.version
            self.engine.admit(job)

    def step(self, number, **options):
        if not self.engine.rows:
            return
        rows = list(self.engine.rows)
        self.engine.step(**options)
        for job in rows:
            draft = job.draft
            assert len(draft) <= BUDGET
            assert all(0 <= token < VOCABULARY for token in draft)
            if draft:
                assert job.fields["speculate"]
                assert self.is_drafting
                assert job.shown == len(job.said) < len(job.answer)
                assert job.total + len(draft) + 1 <= min(CONTEXT, len(job.prompt) + job.params.max_tokens)

    def silent(self, number):
        self.step(number, asks=False)

    def trim(self, number):
        self.step(number, trim=number % 4)

    def hide(self, number):
        for job in self.engine.rows[: 1 + number % 3]:
            job.hidden = 1 + number % 4
        self.step(number)

    def preempt(self, number):
        if self.engine.rows:
            job = self.engine.rows[number % len(self.engine.rows)]
            self.engine.preempt(job)
            self.waiting.append(job)

    def resume(self, number):
        if self.waiting:
            self.engine.resume(self.waiting.pop(number % len(self.waiting)))

    def abort(self, number):
        alive = list(self.engine.jobs.values())
        if alive:
            job = alive[number % len(alive)]
            if job in self.waiting:
                self.waiting.remove(job)
            self.engine.abort(job)

    def refit(self, number):
        self.version += 1
        for job in self.engine.jobs.values():
            job.version = self.version
        self.engine.follower.on_weights(self.version)

    def draft(self, number):
        self.is_drafting = not self.is_drafting
        self.engine.follower.set_drafting(self.is_drafting)

    def settle(self, number):
        self.engine.follower.settle(self.engine.jobs)

    def end(self):
        while self.waiting:
            self.resume(0)
        while self.engine.rows:
            self.step(0)
        self.engine.follower.settle(self.engine.jobs)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.integers(0, 2**32), st.sampled_from([2, 1000]), st.sampled_from(["fixed", "adaptive"]))
def test_a_drafter_hears_each_life_once_and_every_token_in_order(operations, seed, fill, mode):  # field F1 F2 C5 C9
    schedule = Schedule(seed, fill, mode)
    for operation, number in operations:
        schedule.do(operation, number)
    schedule.end()
    seen = schedule.engine.seen
    heard, stats = schedule.listener.heard, schedule.engine.follower.stats
    assert [life.request.request_id for life in heard] == [job.name for job in seen]
    for life, job in zip(heard, seen, strict=True):
        told = job.answer[: job.shown]
        assert life.tokens == told
        assert life.rollout.tokens.tolist() == told
        assert life.rollout.finish_reason == (job.reason if len(told) == len(job.answer) else "abort")
        assert life.rollout.versions.tolist() == life.versions
    assert not schedule.listener.live
    assert stats.tokens_emitted == sum(len(life.tokens) for life in heard)
    assert stats.tokens_accepted == sum(life.rollout.accepted for life in heard) <= stats.tokens_drafted
    assert set(stats.events) <= {"draft_stale", "draft_malformed"}
    assert np.isfinite([stats.pass_seconds, stats.plain_seconds, stats.tokens_expected]).all()
    ended = schedule.engine.follower.take_ended()
    last = {life.request.request_id: life.rollout for life in heard}
    assert ended == {name: (own.drafted, own.accepted, own.forwards) for name, own in last.items()}
