"""verl's vLLM server with the plug-in in it, and the replica that starts such servers."""

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from paceline.integrations.verl.settings import vllm_options


class Server(vLLMHttpServer):
    """A server whose requests are drafted for; the drafter hears of every weight update."""

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        engine_kwargs.update(vllm_options(self.config, engine_kwargs, self.replica_rank))

    def _get_worker_extension_cls(self) -> str:
        return "paceline.integrations.verl.worker.Worker"

    async def set_global_steps(self, global_steps: int) -> None:
        """verl's cue that the weights of this step are loaded."""
        await super().set_global_steps(global_steps)
        await self.engine.collective_rpc("paceline_plugin", args=("on_weights", global_steps))

    async def paceline_report(self) -> dict[str, Any]:
        """What the drafter of this replica did so far: the fields of ``EngineStats``, bytes of history, requests.

        Empty where nothing drafts.
        """
        reports = await self.engine.collective_rpc("paceline_plugin", args=("report",))
        found: dict[str, Any] = next((report for report in reports if report is not None), {})
        return found


class Replica(vLLMReplica):
    """verl's replica of vLLM servers, with ``Server`` for the server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(Server)

    def _get_server_name_prefix(self) -> str:
        return f"{self.config.name}_"  # as the trainer's side looks for it
