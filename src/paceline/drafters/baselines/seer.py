"""Seer: drafts from the siblings of the same group, those in flight and those just finished, and nothing else."""

from paceline.drafters.baselines.suffix_tree import SuffixTreeDrafter


class SeerDrafter(SuffixTreeDrafter):
    """One suffix tree per group, grown while its requests decode; it goes when the group's last request ends.

    The counts are those of SuffixDecoding; see ``SuffixTreeDrafter`` for the options.
    """

    def __init__(
        self,
        depth: int = 64,
        factor: float = 4.0,
        offset: float = 16.0,
        min_prob: float = 0.02,
        tree: bool = True,
        anchor: int = 64,
        own: bool = False,
    ) -> None:
        super().__init__("group", depth, factor, offset, min_prob, tree, anchor=anchor, own=own)
