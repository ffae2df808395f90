"""A rank of the learner as a Ray actor, and what it takes and gives, as bytes."""

import os
import socket
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from paceline.config import Config
from paceline.cotrain.trainer import Trainer
from paceline.rl.batch import Batch
from paceline.rl.cluster.codec import decode, encode
from paceline.rl.cluster.transport import Parcel, Receiver, make_sender
from paceline.rl.drafting import learns
from paceline.rl.fleet import Weights
from paceline.rl.models import ModelError
from paceline.rl.parallel.drafting import MeshStudent
from paceline.rl.parallel.learner import ParallelLearner
from paceline.rl.policy import Policy, device_of
from paceline.rl.sharded import ShardedLearner, fingerprint, join
from paceline.rl.students import load_trainer
from paceline.schema import PacelineError, Tokens
from paceline.signals import ignore_stop_signals

#: Where ranks meet that are all on one node.
LOOPBACK = "127.0.0.1"
#: What comes before the names of the tensors of the policy, the drafter, and an optimiser's state, in a parcel.
POLICY, DRAFTER, OPTIMISER = "policy/", "drafter/", "optimiser/"
#: What gathering or loading the state may take.
STATE_SECONDS = 600.0


class SentBatch(msgspec.Struct, kw_only=True):
    """A ``Batch`` as it travels; groups are numbered."""

    prompts: list[Tokens]
    responses: list[Tokens]
    rewards: npt.NDArray[np.float64]
    group_ids: list[int]
    engine_logprobs: list[npt.NDArray[np.float64]] | None
    versions: list[Tokens] | None
    version: int

    @classmethod
    def of(cls, batch: Batch) -> "SentBatch":
        """What travels of a batch."""
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        numbers = {group: number for number, group in enumerate(dict.fromkeys(batch.group_ids))}
        values["rewards"] = np.asarray(batch.rewards, np.float64)
        values["group_ids"] = [numbers[group] for group in batch.group_ids]
        return cls(**values)

    def batch(self) -> Batch:
        """The batch again."""
        return Batch(**{name: getattr(self, name) for name in self.__struct_fields__})


class Answer(NamedTuple):
    """What a rank says of an update: encoded metrics, optimiser steps taken so far, and what has moved.

    Those give ``weights`` who speak for others; ``taught``, an encoded ``Taught``, the one where the drafter learns.
    """

    metrics: bytes
    updates: int
    weights: Parcel | None
    taught: bytes | None = None


class RankActor:
    """Rank ``rank`` of the learner of a run's effective ``config``, which is its ``codec.encode``.

    The policy is built from the files that ``config`` names, on the CPU, and sharded from there.
    """

    def __init__(self, config: bytes, rank: int) -> None:
        ignore_stop_signals()
        self._config = decode(Config, config)
        self._rank = rank
        self._sender = make_sender("object")
        self._learner: ShardedLearner | ParallelLearner | None = None
        self._student: MeshStudent | None = None
        self._store: Any = None

    def listen(self, host: str) -> int:
        """Serve the ranks' rendezvous at ``host``; returns the port."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listening:
            port = int(listening.getsockname()[1])
            self._store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
        return port

    def join(self, host: str, port: int, secret: str, expected: int) -> None:
        """Load the policy, meet the others and share it with them; ModelError where it is not the ``expected`` one."""
        cluster = self._config.cluster
        torch.set_num_threads(max(1, int(cluster.learner_cpus)))
        if host == LOOPBACK:
            # Else Gloo and NCCL listen where others can reach them.
            name = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
        policy = Policy.load(replace(self._config.policy, device="cpu"), self._config.seed)
        if fingerprint(policy) != expected:
            raise ModelError(
                f"policy.path={self._config.policy.path}: learner rank {self._rank} has other weights than the driver; "
                "give every node the same model"
            )
        device = device_of(self._config.policy.device)
        store = self._store or TCPStore(host, port, is_master=False)
        # The driver sees sooner that a rank hangs; this is for ranks that no driver watches any more.
        config, ranks = self._config, self._config.learner_ranks
        join(self._rank, ranks, PrefixStore(secret, store), device, 2 * cluster.hang_seconds)
        temperature = config.sampling.temperature
        if config.parallel.ranks == 1:
            self._learner = ShardedLearner(policy, config.rl, temperature, device)
            return
        # A drafter may start from any part of the policy.
        self._student = MeshStudent(config, policy) if learns(config) else None
        self._learner = ParallelLearner(
            policy, config.rl, config.parallel, temperature, device, keeps_embeddings=self._student is not None
        )
        if self._student is not None:
            self._student.begin(self._learner)

    def update(self, batch: bytes, lesson: tuple[list[int], list[int]] | None) -> Answer:
        """``Learner.update``, and with a ``lesson``, ``MeshStudent.update``'s rows, the drafter's too."""
        learner, taught = self._joined(), None
        own = decode(SentBatch, batch).batch()
        if lesson is None or self._student is None:
            metrics = learner.update(own)
        else:
            metrics, taught = self._student.update(own, *lesson)
        # All ranks of a stage put together what they share of it.
        state = learner.policy.state()
        moved = {f"{POLICY}{name}": tensor for name, tensor in state.items()} if learner.leads else {}
        trainer = self._trainer()
        teaches = taught is not None and trainer is not None
        if teaches and trainer is not None:
            moved |= {f"{DRAFTER}{name}": tensor.cpu() for name, tensor in trainer.weights.items()}
        return Answer(encode(metrics), learner.updates, self._given(moved), encode(taught) if teaches else None)

    def state(self) -> Parcel | None:
        """``Learner.state``, of those who speak for others."""
        learner = self._joined()
        state = learner.state()
        return self._given({f"{OPTIMISER}{name}": t for name, t in state.items()} if learner.leads else {})

    def drafter_state(self) -> Parcel | None:
        """``Trainer.state``, of the rank that speaks for those where the drafter learns."""
        trainer = self._trainer()
        state = {} if trainer is None else trainer.state()
        return self._given({f"{DRAFTER}{name}": tensor for name, tensor in state.items()})

    def load_state(self, parcel: Parcel) -> None:
        """Restore policy and optimiser."""
        tensors = Receiver(STATE_SECONDS).receive(parcel).policy
        self._joined().load_policy(under(POLICY, tensors))
        self._joined().load_state(under(OPTIMISER, tensors))

    def load_drafter(self, parcel: Parcel) -> str | None:
        """Restore the drafter, and its optimiser's state where the parcel has one; why it does not fit, where so."""
        if self._student is None or self._student.trainer is None:
            return None
        tensors = Receiver(STATE_SECONDS).receive(parcel).policy
        try:
            load_trainer(self._student.trainer, under(DRAFTER, tensors), under(OPTIMISER, tensors) or None)
        except PacelineError as error:
            # Other ranks have no drafter that could refuse, and all go on.
            return str(error)
        return None

    # Beside them, at any time

    def here(self) -> tuple[str, str, int]:
        """Node, address and process."""
        import ray

        return ray.get_runtime_context().get_node_id(), str(ray.util.get_node_ip_address()), os.getpid()

    def passes(self) -> int:
        """Grows while an update makes progress."""
        return 0 if self._learner is None else self._learner.passed

    def _joined(self) -> ShardedLearner | ParallelLearner:
        assert self._learner is not None
        return self._learner

    def _trainer(self) -> Trainer | None:
        """The drafter's, on the rank that speaks for those where it learns."""
        return self._student.trainer if self._student is not None and self._joined().leads else None

    def _given(self, tensors: Mapping[str, Tensor]) -> Parcel | None:
        if not tensors:
            return None
        self._sender.release(0)
        return self._sender.send(Weights(0, tensors))


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a parcel whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
