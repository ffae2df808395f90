"""The plug-in: a proposer of vLLM that drafts from paceline's history, within paceline's budget."""

import logging
from multiprocessing import util
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.budget.controller import BudgetController
from paceline.budget.steptime import StepTimeTable
from paceline.config import BudgetConfig, PluginConfig
from paceline.drafters import history_of, make_drafter
from paceline.drafters.follower import Follower, Introduced
from paceline.drafters.guarded import GuardedDrafter
from paceline.drafters.isolated_wire import Absorb
from paceline.drafters.prober import Prober
from paceline.engines.vllm.versions import require_vllm
from paceline.engines.vllm.workarounds import mend_worker, standing
from paceline.integrations.vllm.keeping import Keeper, place
from paceline.integrations.vllm.requests import Groups, introduced
from paceline.integrations.vllm.runner import builder, drafts_here
from paceline.integrations.vllm.settings import settings_of
from paceline.schema import EngineStats

logger = logging.getLogger("paceline.vllm")


class HistoryProposer:
    """What vLLM builds for ``method: custom_class``; ``num_speculative_tokens`` is the most drafted for a row.

    Settings come as ``additional_config={"paceline": {...}}``, the fields of ``config.PluginConfig``. Whatever goes
    wrong while it proposes costs drafts, never a token: ``drafter_lost`` is counted, and decoding goes on without
    drafts. Raises ConfigError, VllmVersionError or SeamError at construction.
    """

    def __init__(self, vllm_config: Any) -> None:
        require_vllm("plugin")
        from paceline.integrations.vllm.metrics import Exporter  # what it needs comes with vLLM

        config = settings_of(vllm_config)
        self.config: PluginConfig = config
        self.stats = EngineStats(events={})
        self._runner = builder()
        self._drafts_here = drafts_here(vllm_config.parallel_config)
        self._groups = Groups()
        self._exporter = Exporter()
        self._is_lost = False
        drafter = make_drafter(config.drafter, chains=True)
        self._drafter = None if drafter is None else GuardedDrafter(drafter, self._tell)
        self._controller = BudgetController(config.budget, StepTimeTable(), self.stats, warms_up=True)
        self._follower = self._followed_by(self._drafter, self._controller)
        path = place(config, vllm_config.parallel_config.data_parallel_rank) if self._drafts_here else None
        self._keeper = Keeper(self._drafter, path, self.stats.count)
        self._keeper.read(config.drafter.history.warm)
        # Where vLLM ends without shutting its runner down; also in a child process, where ``atexit`` is not heeded.
        self._at_exit = util.Finalize(self, self._keeper.write, exitpriority=10)

    def load_model(self, *_: Any, **__: Any) -> None:
        """vLLM's cue that the policy's weights are there: what is mended is mended before it runs."""
        mended = mend_worker(self._runner.runner, self.config.mend)
        self.stats.events.update({f"mended/{name}": 1 for name in mended})
        self.stats.lossy = standing(speculates=True, mend=self.config.mend)
        for fault in self.stats.lossy:
            logger.warning("%s is not mended: drafts may change what is sampled", fault)
        self._runner.on_shutdown(self.close)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: Any = None,  # noqa: ARG002
    ) -> list[list[int]]:
        """A chain of drafted tokens for each row of vLLM's batch, empty for none."""
        if self._is_lost or not self._drafts_here:
            return [[] for _ in sampled_token_ids]
        try:
            batch = self._runner.batch(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            drafts = self._follower.propose(batch, self._runner.requests)
            self._exporter.update(self.stats, self._history_bytes)
        except Exception as error:  # noqa: BLE001  a fault of the plug-in must not end generation
            self._is_lost = True
            self._tell("drafter_lost", f"{type(error).__name__}: {error}; decoding goes on without drafts")
            return [[] for _ in sampled_token_ids]
        return drafts

    # What an engine asks of it, through its workers

    def report(self) -> dict[str, Any] | None:
        """The fields of ``EngineStats``, ``history_bytes``, and ``requests``; None from a worker that does not draft.

        ``requests`` maps each request that ended since the last report to its drafted tokens, its accepted ones and its
        passes. Ids are vLLM's own, which end with ``-`` and 8 random characters, or what ``paceline_request`` said.
        """
        if not self._drafts_here:
            return None
        requests = {name: list(counts) for name, counts in self._follower.take_ended().items()}
        return {**msgspec.to_builtins(self.stats), "history_bytes": self._history_bytes, "requests": requests}

    def set_drafting(self, on: bool) -> None:
        """With ``on`` false nothing is drafted; what is said is followed all the same."""
        self._follower.set_drafting(on)

    def aside(self, on: bool) -> None:
        """With ``on`` passes are for the sentinel's canaries: drafted for whole, not counted, not learned from."""
        self._follower.aside(on)

    def on_weights(self, version: int) -> None:
        """The policy moved to ``version``."""
        self._follower.on_weights(version)

    def absorb(self, data: bytes) -> None:
        """Responses that other engines decoded, as the msgpack of ``isolated_wire.Absorb``, become history."""
        if self._drafter is not None and self._drafts_here:
            self._drafter.absorb(msgspec.msgpack.decode(data, type=Absorb).rollouts())

    def snapshot(self) -> bytes | None:
        """The history, as a snapshot; None where the drafter has none, and from a worker that does not draft."""
        return (self._keeper.snapshot() or None) if self._drafts_here else None

    def restore(self, data: bytes) -> None:
        """Take over a snapshot. SnapshotError where it is none, or something is remembered already."""
        self._keeper.restore(data)

    def state(self) -> dict[str, Any] | None:
        """What was measured of passes and drafts, for a checkpoint; None from a worker that does not draft."""
        if not self._drafts_here:
            return None
        return {"step_times": self._controller.table.state(), "budget": self._controller.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` gave; KeyError, TypeError or ValueError for anything else."""
        self._controller.table.load_state(state["step_times"])
        self._controller.load_state(state["budget"])

    def probe(self) -> None:
        """From now on draft random tokens, as many as may be, and verify all: passes are measured, not drafts.

        Only while no request is in flight.
        """
        if self._drafter is not None:
            self._drafter.end_process()
        self._drafter = GuardedDrafter(Prober(self._runner.vocabulary, self._runner.budget), self._tell)
        self._controller = BudgetController(BudgetConfig(mode="fixed"), StepTimeTable(), self.stats)
        self._follower = self._followed_by(self._drafter, self._controller)

    def close(self) -> None:
        """End what is followed and write the snapshot, once."""
        try:
            self._follower.settle()
        except Exception as error:  # noqa: BLE001  vLLM's own shutdown must go on
            logger.error("while vLLM ends: %s: %s", type(error).__name__, error)
        self._at_exit()
        if self._drafter is not None:
            self._drafter.end_process()

    def _followed_by(self, drafter: GuardedDrafter | None, controller: BudgetController) -> Follower:
        return Follower(
            drafter,
            controller,
            budget=self._runner.budget,
            context=self._runner.context,
            vocabulary=self._runner.vocabulary,
            introduce=self._introduced,
            stats=self.stats,
        )

    def _introduced(self, request_id: str) -> Introduced | None:
        requests = self._runner.requests
        return introduced(request_id, requests[request_id], self._groups, requests)

    @property
    def _history_bytes(self) -> int:
        return int(getattr(history_of(self._drafter), "nbytes", 0))

    def _tell(self, event: str, message: str) -> None:
        self.stats.count(event)
        logger.error("%s: %s", event, message)
