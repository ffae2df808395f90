"""What a rank of a context-parallel group has of documents: all of their tokens, and the states of its own rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cotrain.documents import Document, Text
from paceline.cotrain.parallel.layout import Layout, LayoutError
from paceline.cotrain.parallel.transport import Transport, check_agreement
from paceline.schema import Tokens, derive_seed


@dataclass(frozen=True)
class ShardDocument(Text):
    """A text with the policy's states at those of its rows that are this rank's.

    The rows of a document, all its tokens but the last, are dealt by ``Layout([rows], world)``, whatever it is packed
    with. ``states_NS`` and ``final_NH`` are of the rank's N rows in their order, of which there may be none, otherwise
    as in ``Document``. Both are None where another data-parallel group holds the document.
    """

    states_NS: Tensor | None
    final_NH: Tensor | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.states_NS is None) != (self.final_NH is None):
            raise ValueError("one of states_NS and final_NH is None; give both, or neither if another group has them")

    @classmethod
    def of(cls, document: Document, world: int, rank: int) -> "ShardDocument":
        """What ``rank`` of ``world`` has of a whole document."""
        rows_N = torch.from_numpy(Layout([document.rows], world).rows(rank)).to(document.states_PS.device)
        return cls(document.tokens, document.prompt_length, document.states_PS[rows_N], document.final_PH[rows_N])

    @property
    def is_held(self) -> bool:
        """Whether this rank's group holds the document."""
        return self.states_NS is not None


@dataclass(frozen=True)
class Shard:
    """A rank's part of packed documents: all their tokens and prompts, and the states of its own rows.

    Rows are those that the policy reads, all tokens of a document but the last, laid out by ``layout``. ``states_NS``
    and ``final_NH`` are of the rank's N rows in their order, otherwise as in ``Document``.
    """

    tokens: Sequence[Tokens]
    prompt_lengths: Sequence[int]
    layout: Layout
    states_NS: Tensor
    final_NH: Tensor

    @classmethod
    def of(cls, documents: Sequence[Document], world: int, rank: int) -> "Shard":
        """What ``rank`` of ``world`` has of whole documents."""
        return cls.packed([ShardDocument.of(document, world, rank) for document in documents], world, rank)

    @classmethod
    def packed(cls, documents: Sequence[ShardDocument], world: int, rank: int) -> "Shard":
        """Documents that the rank's group holds, one behind the other.

        Raises LayoutError for one that it does not hold, or whose states are not of the rank's rows.
        """
        states, final = [], []
        for place, document in enumerate(documents):
            if document.states_NS is None or document.final_NH is None:
                raise LayoutError(f"document {place}: this rank's group does not hold it; leave it out of the pack")
            rows = len(Layout([document.rows], world).rows(rank))
            for name, side in (("states_NS", document.states_NS), ("final_NH", document.final_NH)):
                if len(side) != rows:
                    raise LayoutError(
                        f"document {place}: {name} has {len(side)} rows, and context rank {rank} of {world} owns "
                        f"{rows} of {document.rows}; deal them by Layout([{document.rows}], {world})"
                    )
            states.append(document.states_NS)
            final.append(document.final_NH)
        tokens, prompts = ([getattr(each, name) for each in documents] for name in ("tokens", "prompt_length"))
        layout = Layout([document.rows for document in documents], world)
        return cls(tokens, prompts, layout, torch.cat(states), torch.cat(final))

    @property
    def texts(self) -> list[Text]:
        """The documents without their states."""
        return [Text(*each) for each in zip(self.tokens, self.prompt_lengths, strict=True)]


def check_texts(
    texts: Sequence[Text], layout: Layout, transport: Transport, update: int, device: torch.device | str
) -> None:
    """Raise LayoutError on every rank of a group whose ranks have other texts, or lay them out or draw otherwise.

    ``update`` is what terms are drawn by, 0 where none are. ``device`` is one that the group's tensors travel from.
    """
    tokens = [text.tokens.tolist() for text in texts]
    agreed = derive_seed("texts", update, *tokens, [text.prompt_length for text in texts])
    check_agreement(layout, transport, agreed, device=device)
