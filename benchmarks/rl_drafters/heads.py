"""EAGLE-3 heads beside a recorded run: how they start, and what they become when they are trained after every step."""

import json
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch
from recording import Recording
from torch import Tensor

from paceline.config import HeadConfig
from paceline.cotrain.documents import Document
from paceline.cotrain.taps import Collector
from paceline.cotrain.trainer import Trainer
from paceline.drafters.heads import Head, make_head
from paceline.rl.drafting import FOLDER
from paceline.rl.policy import Policy
from paceline.rl.schooling import Schooling, school
from paceline.schema import RolloutRequest, Tokens, as_tokens

Start = Literal["random", "in-domain"]
STARTS: tuple[Start, ...] = ("random", "in-domain")


#: How a head learns before the run: on what the starting policy says to prompts that the run does not use.
FULL = Schooling(prompts=256, samples=4, epochs=12, batch=16)
QUICK = Schooling(prompts=2, samples=2, epochs=1, batch=2, held_out=0.5)


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
        path = str(taught(recording, self.schooling, tell)) if self.start == "in-domain" else None
        head = make_head("eagle3", HeadConfig(path=path, init="random"), policy.model, config.seed)
        trainer = Trainer(head, policy.model, config.cotrain, config.sampling.temperature)
        self._keep(0, head)
        log = []
        for step in range(recording.steps):
            policy.load_state(recording.weights(step))
            requests, rows = recording.requests(step), recording.rows(step)
            started = time.process_time()
            documents, _ = tapped(policy, requests, [as_tokens(row.tokens) for row in rows], head)
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
) -> tuple[list[Document], float]:
    """What the log-probability pass over rollouts tells a head, and the policy's mean entropy in nats."""
    collector = Collector(policy.model, head.taps)
    try:
        with torch.no_grad():
            prompts = [request.prompt for request in requests]
            _, entropy_N = policy.scorer.logprobs(prompts, responses, 1.0, collector)
    finally:
        collector.close()
    return collector.documents(), float(entropy_N.mean())


def in_domain(recording: Recording) -> Path:
    """Where the in-domain start of a policy's head is kept, and all about its training."""
    return recording.home / recording.size.name / f"{recording.policy}-in-domain"


def taught(recording: Recording, schooling: Schooling, tell: Callable[[str], None] = print) -> Path:
    """The folder of the in-domain start, which ``paceline draft train`` would write as well; made where missing."""
    home = in_domain(recording)
    if not (home / FOLDER).is_dir():
        config = recording.config("drafter.kind=eagle3", "drafter.head.init=random")
        found = school(config, schooling, home, overwrite=True, tell=tell)
        for mark in found.marks:
            own = mark.held_out
            overlaps = " ".join(f"{own[name]:.3f}" for name in own if name.startswith("overlap"))
            tell(f"{home.name}, epoch {mark.epoch}: held out, loss {own['loss']:.3f}, overlap by pass {overlaps}")
        tell(f"{home.name}: {found.tokens} tokens, {found.updates} updates, {found.seconds:.0f} s")
    return home / FOLDER
