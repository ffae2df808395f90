"""Why a frozen head falls behind or does not: what it and a trained one have in common with a policy that moves."""

from collections.abc import Callable
from typing import Any

from heads import Follower, tapped
from recording import Recording

from paceline.config import HeadConfig
from paceline.cotrain.trainer import Trainer
from paceline.drafters.heads import make_head
from paceline.rl.policy import Policy
from paceline.schema import as_tokens

EVERY = 4


def steps_of(recording: Recording) -> list[int]:
    """Every fourth step and the last one; those of all speeds have the same prompts."""
    return sorted({*range(0, recording.steps, EVERY), recording.steps - 1})


def measure(recording: Recording, follower: Follower, tell: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Judge the head, as it started and as it is by then, at the ``steps_of`` a recording.

    Each step's policy reads two sets of texts: the ``first`` step's, always the same ones, and its ``own``. Of each:
    the policy's mean entropy (nats), and for either head the metrics of ``Trainer.judge``. On the first step's texts a
    loss of overlap is the head's alone; on its own a policy also comes to say what is easier or harder to draft.
    """
    config = recording.config()
    policy = Policy.load(config.policy, config.seed)
    head = make_head("eagle3", HeadConfig(init="random"), policy.model, config.seed)
    trainer = Trainer(head, policy.model, config.cotrain, config.sampling.temperature)
    found: list[dict[str, Any]] = []
    for step in steps_of(recording):
        policy.load_state(recording.weights(step))
        for texts, source in (("first", 0), ("own", step)):
            responses = [as_tokens(row.tokens) for row in recording.rows(source)]
            documents, entropy = tapped(policy, recording.requests(source), responses, head)
            row: dict[str, Any] = {"step": step, "texts": texts, "entropy": entropy}
            for state, version in (("frozen", 0), ("online", step)):
                trainer.load_weights(follower.version(version))
                row[state] = trainer.judge(documents)
            found.append(row)
        tell(f"{recording.folder.name}: heads judged at step {step}")
    return found
