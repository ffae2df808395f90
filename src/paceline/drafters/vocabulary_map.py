"""How the tokens of two vocabularies stand for one another, so that a draft model may have a tokenizer of its own.

Tokens of the same bytes are shared. A draft is made of shared tokens only, by the draft model's law over them
(token-level intersection, arXiv 2502.05202). A context has tokens that are not shared as well: each is spelled with the
draft model's own tokens, by itself, so that what is cached of a text stays true while the text grows.
"""

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.convert_slow_tokenizer import bytes_to_unicode

from paceline.forward.pretrained import ModelError

#: The least share of the smaller vocabulary that must be shared.
LEAST_SHARED = 0.25


class VocabularyError(ModelError):
    """A draft model whose vocabulary is too far from the policy's; the message is one line."""


class Pieces:
    """What the ids of a fast tokenizer, byte-level or with byte fallback, stand for.

    ``bytes_of`` are those of ids that stand for bytes, ``controls`` the names of those that stand for none. Raises
    VocabularyError where a tokenizer of another kind hides them.
    """

    def __init__(self, tokenizer: Any, size: int, name: str) -> None:
        self.tokenizer = tokenizer
        self.bytes_of: dict[int, bytes] = {}
        self.controls: dict[int, str] = {}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise VocabularyError(f"{name}: the bytes of its tokens are not known, {type(tokenizer).__name__} is slow")
        text = json.loads(backend.to_str())
        decoder = json.dumps(text["decoder"])
        alphabet = {char: byte for byte, char in bytes_to_unicode().items()}
        is_bytewise, falls_back = '"ByteLevel"' in decoder, '"ByteFallback"' in decoder
        if not is_bytewise and not falls_back:
            raise VocabularyError(f"{name}: the bytes of its tokens are not known; give a byte-level or BPE tokenizer")
        added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if index < size}
        for piece, index in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1]):
            if index >= size:
                continue
            if index in added:
                if added[index].special:
                    self.controls[index] = piece
                else:
                    self.bytes_of[index] = piece.encode()
            elif is_bytewise:
                if all(char in alphabet for char in piece):
                    self.bytes_of[index] = bytes(alphabet[char] for char in piece)
            elif len(piece) == 6 and piece.startswith("<0x"):
                self.bytes_of[index] = bytes([int(piece[3:5], 16)])
            else:
                self.bytes_of[index] = piece.replace("\u2581", " ").encode()

    @cached_property
    def ids(self) -> Mapping[bytes, int]:
        """The id that says these bytes: a byte's own comes after a piece that says the same, and then the lowest."""
        names = self.tokenizer.convert_ids_to_tokens(list(self.bytes_of))
        best: dict[bytes, tuple[int, int]] = {}
        for (index, said), name in zip(self.bytes_of.items(), names, strict=True):
            rank = int(name.startswith("<0x")), index
            if said and (said not in best or rank < best[said]):
                best[said] = rank
        return {said: index for said, (_, index) in best.items()}

    def spell(self, said: bytes) -> tuple[int, ...]:
        """Ids that say these bytes together: as the tokenizer would, else the longest ones first; maybe none."""
        try:
            ids = self.tokenizer.encode(said.decode(), add_special_tokens=False)
        except UnicodeDecodeError:
            ids = []
        if b"".join(self.bytes_of.get(index, b"") for index in ids) == said:
            return tuple(ids)
        spelled, at = [], 0
        while at < len(said):
            end = next((end for end in range(len(said), at, -1) if said[at:end] in self.ids), None)
            if end is None:
                return ()
            spelled.append(self.ids[said[at:end]])
            at = end
        return tuple(spelled)


class VocabularyMap:
    """From the policy's ids to a draft model's: ``pairs``, and ``spell`` for tokens that have no counterpart.

    ``shared_K`` are the policy's ids that have one, rising, ``drafts_K`` what the draft model calls them, and
    ``opening`` is what its tokenizer puts before every text. Where ``is_same`` ids mean the same to both, and one
    vocabulary is only padded.
    """

    def __init__(
        self,
        pairs: Mapping[int, int],
        spell: Callable[[int], tuple[int, ...]] = lambda _: (),
        opening: tuple[int, ...] = (),
    ) -> None:
        self.shared_K: npt.NDArray[np.int64] = np.array(sorted(pairs), dtype=np.int64)
        self.drafts_K: npt.NDArray[np.int64] = np.array([pairs[index] for index in sorted(pairs)], dtype=np.int64)
        self.opening = opening
        self.is_same = bool((self.shared_K == self.drafts_K).all())
        self._spelled: dict[int, tuple[int, ...]] = {token: (own,) for token, own in pairs.items()}
        self._spell = spell

    @classmethod
    def between(cls, policy: Any, draft: Any, sizes: tuple[int, int], name: str) -> "VocabularyMap | None":
        """The map between two tokenizers whose models have ``sizes`` of tokens; None where no map is needed.

        ``name`` is the draft model's in messages. Without a tokenizer (None) ids are taken to mean the same, if there
        are as many of them. Raises VocabularyError, with both sizes, where a tokenizer is wanted and is not there or
        hides its bytes, and where fewer than ``LEAST_SHARED`` of the smaller vocabulary are shared.
        """
        said = f"{name}: its vocabulary has {sizes[1]} tokens, the policy's {sizes[0]}"
        if policy is None or draft is None:
            if sizes[0] == sizes[1]:
                return None
            raise VocabularyError(f"{said}; drafter and policy must share a tokenizer, or both must have one to map by")
        if policy.get_vocab() == draft.get_vocab():
            return None if sizes[0] == sizes[1] else cls({token: token for token in range(min(sizes))})
        ours, theirs = Pieces(policy, sizes[0], "the policy"), Pieces(draft, sizes[1], name)
        pairs = _pairs(ours, theirs)
        if len(pairs) < LEAST_SHARED * min(sizes):
            raise VocabularyError(
                f"{said}, and they share {len(pairs)}; at least {LEAST_SHARED:.0%} of the smaller must be shared: "
                "take a draft model whose tokenizer is nearer to the policy's"
            )
        start = draft.bos_token_id
        opening = (start,) if start is not None and draft("a")["input_ids"][:1] == [start] else ()
        return cls(pairs, lambda token: theirs.spell(ours.bytes_of.get(token, b"")), opening)

    def spell(self, token: int) -> tuple[int, ...]:
        """The draft model's ids for a token of the policy's: one where it has a counterpart.

        None for a control token that the draft model does not have, and for bytes that it cannot say: they are left
        out of what it reads, which can cost acceptance and nothing else.
        """
        spelled = self._spelled.get(token)
        if spelled is None:
            spelled = self._spelled[token] = self._spell(token)
        return spelled


def _pairs(policy: Pieces, draft: Pieces) -> dict[int, int]:
    """Tokens of the same bytes, control tokens of the same name, and what ends a text."""
    pairs = {policy.ids[said]: draft.ids[said] for said in policy.ids.keys() & draft.ids.keys()}
    named = {control: index for index, control in draft.controls.items()}
    pairs |= {index: named[control] for index, control in policy.controls.items() if control in named}
    ours, theirs = policy.tokenizer.eos_token_id, draft.tokenizer.eos_token_id
    if ours in policy.controls and theirs in draft.controls and ours not in pairs and theirs not in pairs.values():
        pairs[ours] = theirs
    return pairs
