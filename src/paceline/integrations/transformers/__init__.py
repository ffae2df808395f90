"""paceline inside transformers' ``generate``: drafts from what the model said before, to be checked by the model."""

from paceline.integrations.transformers.asked import SpeculationError
from paceline.integrations.transformers.settings import SpeculationSettings
from paceline.integrations.transformers.speculation import Speculation

__all__ = ["Speculation", "SpeculationError", "SpeculationSettings"]
