"""The drafter beside a policy: its sizes as ``drafters.heads`` makes it, and what a pass of its training keeps."""

from typing import Literal

import msgspec

from paceline.config import CotrainConfig, HeadConfig
from paceline.drafters.heads.block import block_taps
from paceline.drafters.heads.make import default_taps
from paceline.sizes.shapes import Shape

DrafterKind = Literal["eagle3", "dflash"]
#: Layers of a block head as DFlash has them (arXiv 2602.06036).
_BLOCK_LAYERS = 5


class DrafterShape(msgspec.Struct, frozen=True, kw_only=True):
    """A head in the shape of its policy. ``vocabulary`` is what it drafts from; ``block`` is of block heads alone.

    ``passes`` is how deep an EAGLE-3 head is trained (training-time test, arXiv 2503.01840); a block head has one.
    """

    kind: DrafterKind
    taps: tuple[int, ...]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    policy_vocabulary: int
    passes: int
    block: int

    @property
    def q(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def output_parameters(self) -> int:
        """Those of its own output matrix; a block head has the policy's."""
        return self.vocabulary * self.hidden if self.kind == "eagle3" else 0

    def parameters(self) -> int:
        """All that train."""
        fused = len(self.taps) * self.hidden**2
        mlp = 3 * self.hidden * self.ffn
        inward = self.hidden * (self.q + 2 * self.kv)
        layer = inward + self.q * self.hidden + mlp + 2 * self.hidden
        if self.kind == "eagle3":
            # The first layer reads two states side by side, the second behind a norm of its own.
            return fused + self.layers * layer + inward + 2 * self.hidden + self.output_parameters
        return fused + self.layers * (layer + 2 * self.head_dim) + 3 * self.hidden

    def rows(self, tokens: int) -> int:
        """Rows of a pass over ``tokens`` tokens: theirs, or those of blocks that draft them once over."""
        if self.kind == "eagle3":
            return tokens
        return -(-tokens // self.block) * (1 + self.block)

    def branch_rows(self, tokens: int) -> int:
        """Rows whose own keys and values are kept: every later pass keeps again those of the later ones before it."""
        return tokens * self.passes * (self.passes - 1) // 2 if self.kind == "eagle3" else self.rows(tokens)

    def saved_bytes(self, tokens: int, width: int) -> int:
        """Bytes that autograd keeps of all passes over ``tokens`` tokens in ``width`` bytes a number.

        Without the taps and without keys and values, which the plan lists for themselves. Norms compute in float32 and
        keep what they read and what they made, as torch's does where it is composed of parts; CUDA's own keeps less.
        Exact for EAGLE-3 but for a document's last rows, which later passes do not score.
        """
        b, h, rows = width, self.hidden, self.rows(tokens)
        norm = 8 * h + 4
        attended = 2 * b * self.q + 4 * self.heads
        mlp = b * h + 4 * b * self.ffn
        score = 4 * h + 8
        if self.kind == "eagle3":
            first = 4 * h + norm + 2 * b * h + 2 * b * self.head_dim
            further = (self.layers - 1) * (2 * norm + b * h + attended + mlp)
            row = first + attended + norm + mlp + further + norm + score
            # In float32 what a pass carries on is what the next one's norm reads; the first pass's is picked out of.
            shared = 4 * h * max(self.passes - 2, 0) if b == 4 else 0
            return tokens * (self.passes * row + 8 - shared) + 4 * self.output_parameters
        key_norm = 8 * self.kv + 4 * self.kv_heads
        query_norm = 8 * self.q + 4 * self.heads
        layer = rows * (2 * norm + query_norm + attended + mlp) + (tokens + rows) * (b * h + key_norm)
        return self.layers * layer + tokens * norm + rows * (norm + score) + (tokens + rows) * 2 * b * self.head_dim


def drafter_for(
    shape: Shape,
    kind: DrafterKind,
    *,
    layers: int | None = None,
    vocabulary: int = 0,
    passes: int | None = None,
    block: int | None = None,
) -> DrafterShape:
    """The head that ``drafters.heads`` would make for a policy; None and 0 are the defaults of the configuration."""
    taps = default_taps(shape.layers) if kind == "eagle3" else block_taps(shape.layers)
    whole = min(vocabulary or shape.vocabulary, shape.vocabulary)
    return DrafterShape(
        kind=kind,
        taps=tuple(taps),
        layers=layers or (1 if kind == "eagle3" else _BLOCK_LAYERS),
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.drafter_ffn,
        vocabulary=whole if kind == "eagle3" else shape.vocabulary,
        policy_vocabulary=shape.vocabulary,
        passes=(passes or CotrainConfig().passes) if kind == "eagle3" else 1,
        block=(block or HeadConfig().block) if kind == "dflash" else 1,
    )
