"""Who generates and who trains: the engine and the learner of this process, or workers on Ray."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from paceline.config import Config
from paceline.rl import folder
from paceline.rl.drafting import sentinel
from paceline.rl.engine import make_engine
from paceline.rl.learner import Learner
from paceline.rl.local import LocalFleet
from paceline.rl.policy import Policy

if TYPE_CHECKING:
    from paceline.rl.cluster.learners import RemoteLearner
    from paceline.rl.cluster.ray_fleet import RayFleet

RunLearner: TypeAlias = "Learner | RemoteLearner"
"""Who updates the policy; the policy of the run holds the weights after every update."""

RunFleet: TypeAlias = "LocalFleet | RayFleet"
"""What the loop drives: a ``fleet.Fleet`` that also keeps what it learned over a resume, and checks itself."""


def make_fleet(
    config: Config, policy: Policy, out: Path, has_grammars: bool, warn: Callable[[str, str], None]
) -> RunFleet:
    """The fleet that ``config`` asks for, at the policy's weights; ``warn`` takes events: a name and one line each.

    PacelineError, one line, for what cannot be honoured or started.
    """
    if config.cluster.kind == "ray":
        from paceline.rl.cluster.ray_fleet import RayFleet

        return RayFleet(config, has_grammars)
    watched = replace(config, engine=replace(config.engine, sentinel=sentinel(config)))
    return LocalFleet(make_engine(watched, policy, out / folder.EXPORT, has_grammars), config, warn)


def make_learner(config: Config, policy: Policy) -> RunLearner:
    """The learner that ``config`` asks for, of the policy as it is. PacelineError, one line, where it cannot start."""
    if config.learner_ranks == 1:
        return Learner(policy, config.rl, config.sampling.temperature)
    from paceline.rl.cluster.learners import RemoteLearner

    return RemoteLearner(config, policy)
