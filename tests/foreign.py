"""An engine that is not ours, as a follower sees it: rows, lengths, tokens, what was emitted and verified."""

from itertools import count

import numpy as np

from paceline.drafters.follower import Batch, Introduced
from paceline.schema import RolloutRequest, SamplingParams, as_tokens

WIDTH = 4096


class Identity:
    """What an engine holds of a request; comparing it may be dear or fail."""

    def __eq__(self, other):
        raise AssertionError("identities are compared with `is` only")

    __hash__ = None


class Job:
    """One life of a request, and all that the policy will say: ``answer`` to its end, ``beyond`` it never heard."""

    def __init__(self, name, prompt, answer, beyond=(), **request):
        self.name = name
        self.prompt = list(prompt)
        self.answer = list(answer)
        self.beyond = list(beyond)
        self.identity = Identity()
        self.said = []
        self.draft = []
        self.filled = 0
        self.hidden = 0
        self.request = request

    @property
    def is_done(self):
        return len(self.said) >= len(self.answer)


class ForeignEngine:
    """Decodes known answers. ``fill`` prompt tokens of a row are filled a pass; stops are only noticed after the pass.

    ``stop_ids`` and the length limits of a job are up to the test: they must end its answer where it ends.
    """

    def __init__(self, follower=None, fill=1 << 30, stop_ids=()):
        self.follower = follower
        self.fill = fill
        self.stop_ids = tuple(stop_ids)
        self.jobs = {}  # alive, in the batch or not
        self.rows = []
        self.introduced = []
        self.drafted = {}
        self.passes = count()

    def introduce(self, name):
        job = self.jobs[name]
        self.introduced.append(name)
        params = SamplingParams(max_tokens=job.request.get("max_tokens", 1000), min_tokens=job.request.get("min", 0))
        request = RolloutRequest(
            request_id=job.request.get("name", name),
            prompt=as_tokens(job.prompt),
            params=params,
            group=job.request.get("group", ""),
            speculate=job.request.get("speculate", True),
        )
        return Introduced(request=request, stop_ids=self.stop_ids)

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

    def step(self, calls=True, trim=1 << 30):
        """One pass; with ``calls`` false the follower is not asked, ``trim`` is the most tokens verified of a draft."""
        emitted, verified = [], []
        for job in self.rows:
            total = len(job.prompt) + len(job.said)
            job.filled += min(self.fill, total - job.filled)
            if job.filled < total:
                emitted.append([])
                verified.append(0)
                continue
            draft = job.draft[:trim]
            ahead = [*job.answer, *job.beyond][len(job.said) :]
            right = 0
            while right < len(draft) and right + 1 < len(ahead) and draft[right] == ahead[right]:
                right += 1
            job.said += ahead[: right + 1]
            job.filled += right
            emitted.append(ahead[: right + 1])
            verified.append(len(draft))
        chains = self.ask(emitted, verified) if calls else [[] for _ in self.rows]
        for job, chain in zip(self.rows, chains, strict=True):
            job.draft = list(chain)
        done = [job for job in self.rows if job.is_done]
        for job in done:
            self.abort(job)
        return done

    def batch(self, emitted, verified):
        tokens = np.full((len(self.rows) + 1, WIDTH), -7, dtype=np.int32)
        lengths = np.zeros(len(self.rows) + 1, dtype=np.int32)
        for index, job in enumerate(self.rows):
            text = job.prompt + job.said
            tokens[index, : len(text)] = text
            tokens[index, len(text) - job.hidden : len(text)] = -1
            lengths[index] = len(text)
        names = [job.name for job in self.rows]
        return Batch(names, [job.identity for job in self.rows], tokens, lengths, emitted, verified)

    def ask(self, emitted, verified):
        return self.follower.propose(self.batch(emitted, verified), self.jobs)

    def run(self, **options):
        done = []
        while self.rows:
            done += self.step(**options)
        return done
