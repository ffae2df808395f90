"""What a drafter learns from: rollouts with the hidden states that the policy had at their positions."""

from dataclasses import dataclass

from torch import Tensor

from paceline.schema import Tokens


@dataclass(frozen=True)
class Document:
    """A prompt and its response, L ``tokens``, of which the first ``prompt_length`` are the prompt.

    The policy never reads the last token, so there are states of the L - 1 positions before it: ``states_PS`` are the
    outputs of the tapped layers, one after the other, and ``final_PH`` what the policy's output matrix reads. Row p
    predicts token p + 1. All are detached.
    """

    tokens: Tokens
    prompt_length: int
    states_PS: Tensor
    final_PH: Tensor

    def __post_init__(self) -> None:
        for name in ("states_PS", "final_PH"):
            rows = len(getattr(self, name))
            if rows != len(self.tokens) - 1:
                raise ValueError(f"{name}: {rows} rows for {len(self.tokens)} tokens; give one for each but the last")
        if not 0 < self.prompt_length < len(self.tokens):
            raise ValueError(f"prompt_length {self.prompt_length}: needs at least one token on either side")
