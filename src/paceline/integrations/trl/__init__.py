"""paceline inside TRL: rollouts that are drafted, weights and log-probabilities that are the trainer's own."""

from paceline.integrations.trl.rollouts import Rollouts, TrlError, rollout_func
from paceline.integrations.trl.settings import TrlSettings
from paceline.integrations.trl.vllm import Drafting, speculate

__all__ = ["Drafting", "Rollouts", "TrlError", "TrlSettings", "rollout_func", "speculate"]
