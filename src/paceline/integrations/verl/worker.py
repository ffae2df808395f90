"""What vLLM's workers are asked by verl, and by paceline."""

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from paceline.engines.vllm.worker import WorkerExtension


class Worker(vLLMColocateWorkerExtension, WorkerExtension):
    """verl's weight updates and paceline's plug-in, both by name through ``collective_rpc``."""
