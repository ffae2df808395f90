"""The reference engine on transformers: continuous batching, per-row KV, chains and trees."""

from paceline.engines.hf.engine import HFEngine
from paceline.engines.intake import RequestError
from paceline.forward.attention import UnsupportedModelError
from paceline.forward.runner import WeightsError

__all__ = ["HFEngine", "RequestError", "UnsupportedModelError", "WeightsError"]
