"""Which rows are trained on and which are held out: a fixed function of each row's key."""

from collections.abc import Sequence

from paceline.rl.tasks.base import Split
from paceline.schema import derive_seed

_EVAL_OF = 5


def split_of(key: str) -> Split:
    """The split of the row ``key``: about one row in five is held out, the same one whatever the seed."""
    return "eval" if derive_seed("split", key) % _EVAL_OF == 0 else "train"


def choose(keys: Sequence[str], split: Split, count: int, seed: int) -> list[int]:
    """The places in ``keys`` of ``count`` rows of ``split``, in an order drawn by ``seed``; asking for more extends it.

    Raises ValueError where the split has fewer rows.
    """
    places = [place for place, key in enumerate(keys) if split_of(key) == split]
    if count > len(places):
        raise ValueError(f"{count} {split}_prompts asked for, the data has {len(places)}; lower {split}_prompts")
    return sorted(places, key=lambda place: derive_seed("choose", seed, keys[place]))[:count]
