"""paceline inside verl: the rollout ``paceline`` is verl's own vLLM rollout, drafted by the plug-in.

verl loads this module where ``VERL_USE_EXTERNAL_MODULES`` names it. The way in is verl's registries of rollouts, as
version 0.9.1 has them: ``verl.workers.rollout.replica`` for servers, ``verl.workers.rollout.base`` for the trainer.
"""

import importlib.util
from typing import Any

#: ``actor_rollout_ref.rollout.name``.
NAME = "paceline"
#: What the trainer's workers talk to the servers with; verl's own serves, it finds them by the rollout's name.
_ADAPTER = "verl.workers.rollout.vllm_rollout.ServerAdapter"


def register() -> None:
    """Make ``NAME`` known to both of verl's registries; twice is as good as once."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(NAME, _replica)
    _ROLLOUT_REGISTRY[NAME, "async"] = _ADAPTER


def _replica() -> Any:
    from paceline.integrations.verl.rollout import Replica  # needs vLLM, which only a server has

    return Replica


if importlib.util.find_spec("verl") is not None:
    register()
