"""What a drafter learns from: rollouts with the hidden states that the policy had at their positions."""

from dataclasses import dataclass

from torch import Tensor

from paceline.schema import Tokens


@dataclass(frozen=True)
class Text:
    """A prompt and its response, L ``tokens``, of which the first ``prompt_length`` are the prompt.

    Raises ValueError where either has no token.
    """

    tokens: Tokens
    prompt_length: int

    def __post_init__(self) -> None:
        if not 0 < self.prompt_length < len(self.tokens):
            raise ValueError(f"prompt_length {self.prompt_length}: needs at least one token on either side")

    @property
    def rows(self) -> int:
        """The positions that the policy reads: all but that of the last token."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Document(Text):
    """A text with the policy's states.

    The policy never reads the last token, so there are states of the L - 1 positions before it: ``states_PS`` are the
    outputs of the tapped layers, one after the other, and ``final_PH`` what the policy's output matrix reads. Row p
    predicts token p + 1. All are detached.
    """

    states_PS: Tensor
    final_PH: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("states_PS", "final_PH"):
            rows = len(getattr(self, name))
            if rows != self.rows:
                raise ValueError(f"{name}: {rows} rows for {len(self.tokens)} tokens; give one for each but the last")
