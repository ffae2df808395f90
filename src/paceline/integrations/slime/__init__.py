"""paceline's hooks in slime, by slime's own arguments; docs/frameworks.md says what they can do beside SGLang.

``--custom-rollout-log-function-path paceline.integrations.slime.record`` writes a log for ``paceline replay``;
``--custom-generate-function-path paceline.integrations.slime.generate`` decodes with ``paceline serve``.
"""

from paceline.integrations.slime.generating import SlimeError, generate
from paceline.integrations.slime.recording import record

__all__ = ["SlimeError", "generate", "record"]
