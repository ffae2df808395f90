"""EAGLE-3 heads beside a recorded run: how they start, and what they become when they are trained after every step."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
import safetensors.torch
import torch
from recording import Recording
from torch import Tensor

from paceline.config import HeadConfig
from paceline.cotrain.documents import Document
from paceline.cotrain.export import stored_head, write_head
from paceline.cotrain.taps import Collector
from paceline.cotrain.trainer import Trainer
from paceline.drafters.heads import Head, make_head
from paceline.engines.hf import HFEngine
from paceline.rl.policy import Policy
from paceline.schema import RolloutRequest, Tokens, as_tokens, derive_seed

Start = Literal["random", "in-domain"]
STARTS: tuple[Start, ...] = ("random", "in-domain")


@dataclass(frozen=True)
class Schooling:
    """How long a head learns before the run: on the policy's rollouts on other prompts, read ``epochs`` times."""

    prompts: int = 192
    samples: int = 4
    epochs: int = 6
    #: Documents of an optimiser step.
    batch: int = 32


FULL = Schooling()
QUICK = Schooling(prompts=2, samples=2, epochs=1, batch=4)


class Follower:
    """A head that starts as ``start`` says and is trained on each step's rollouts; its versions are kept on the disk.

    Version s is what drafts in step s, version 0 the start.
    """

    def __init__(self, recording: Recording, start: Start, schooling: Schooling) -> None:
        self.recording = recording
        self.start = start
        self.schooling = schooling
        self.folder = recording.folder / f"head-{start}"

    def version(self, step: int) -> dict[str, Tensor]:
        """The weights that draft in a step."""
        return safetensors.torch.load_file(self._file(step))

    @cached_property
    def log(self) -> list[dict[str, float]]:
        """For each step the trainer's metrics, and the processor seconds of its training and of the tapped pass."""
        found: list[dict[str, float]] = json.loads((self.folder / "log.json").read_text())
        return found

    def make(self, tell: Callable[[str], None] = print) -> None:
        """Train the head along the recording, unless that is done."""
        if (self.folder / "log.json").is_file():
            return
        self.folder.mkdir(exist_ok=True)
        recording, config = self.recording, self.recording.config()
        policy = Policy.load(config.policy, config.seed)
        path = str(school(recording, policy, self.schooling, tell)) if self.start == "in-domain" else None
        head = make_head("eagle3", HeadConfig(path=path, init="random"), policy.model, config.seed)
        trainer = Trainer(head, policy.model, config.cotrain, config.sampling.temperature)
        self._keep(0, head)
        log = []
        for step in range(recording.steps):
            policy.load_state(recording.weights(step))
            requests, rows = recording.requests(step), recording.rows(step)
            started = time.process_time()
            documents = tapped(policy, requests, [as_tokens(row.tokens) for row in rows], head)
            scored = time.process_time()
            found = trainer.train(documents)
            seconds = {"logprob": scored - started, "drafter": time.process_time() - scored}
            log.append(found | seconds)
            self._keep(step + 1, head)
            tell(f"{self.folder.parent.name}, {self.start} head: step {step}, loss {found['loss']:.3f}")
        (self.folder / "log.json").write_text(json.dumps(log, indent=1), encoding="utf-8")

    def _keep(self, step: int, head: Head) -> None:
        tensors = {name: tensor.detach().contiguous() for name, tensor in head.checkpoint().items()}
        safetensors.torch.save_file(tensors, self._file(step))

    def _file(self, step: int) -> Path:
        return self.folder / f"{step:03}.safetensors"


def tapped(
    policy: Policy, requests: Sequence[RolloutRequest], responses: Sequence[Tokens], head: Head
) -> list[Document]:
    """What the log-probability pass over rollouts tells a head."""
    collector = Collector(policy.model, head.taps)
    try:
        with torch.no_grad():
            policy.scorer.logprobs([request.prompt for request in requests], responses, 1.0, collector)
    finally:
        collector.close()
    return collector.documents()


def in_domain(recording: Recording) -> Path:
    """Where the in-domain start of a policy's head is kept."""
    return recording.home / recording.size.name / f"{recording.policy}-in-domain"


def school(recording: Recording, policy: Policy, schooling: Schooling, tell: Callable[[str], None] = print) -> Path:
    """An in-domain start, trained on rollouts of the starting policy on prompts that the run never sees; cached."""
    home = in_domain(recording)
    if home.is_dir():
        return home
    config = recording.config()
    requests = recording.other_requests(schooling.prompts, schooling.samples)
    engine = HFEngine(policy.engine_model(), config=config.engine, seed=config.seed, eos_ids=policy.eos_ids)
    said = [rollout.tokens for rollout in engine.generate(requests)]
    engine.close()
    head = make_head("eagle3", HeadConfig(init="random"), policy.model, config.seed)
    parts = range(0, len(requests), schooling.samples * 8)
    documents = [
        document
        for at in parts
        for document in tapped(policy, requests[at : at + parts.step], said[at : at + parts.step], head)
    ]
    updates = max(1, len(documents) // schooling.batch)
    once = msgspec.structs.replace(
        config.cotrain, updates=updates, schedule="cosine", schedule_steps=updates * schooling.epochs + 1
    )
    trainer = Trainer(head, policy.model, once, config.sampling.temperature)
    started = time.process_time()
    for epoch in range(schooling.epochs):
        order = sorted(range(len(documents)), key=lambda place, epoch=epoch: derive_seed("school", epoch, place))
        found = trainer.train([documents[place] for place in order])
        tell(
            f"{recording.policy}, in-domain start: epoch {epoch}, {found['tokens']:.0f} tokens, "
            f"loss {found['loss']:.3f}, overlap {found['overlap_1']:.3f}, {time.process_time() - started:.0f} s"
        )
    return write_head(stored_head(head, policy=recording.policy, version=0), home)
