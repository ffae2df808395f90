"""paceline inside somebody else's vLLM: the drafter plug-in, and serving with it.

``speculative_config={"method": "custom_class", "model": "paceline.integrations.vllm.HistoryProposer",
"num_speculative_tokens": 16}`` is all that a vLLM needs.
"""

from paceline.integrations.vllm.proposer import HistoryProposer

__all__ = ["HistoryProposer"]
