"""Test vectors of the kernels and of the torch code that specifies them: logits, laws and drafts of every shape."""

from dataclasses import dataclass

import numpy as np
import torch

from paceline.sampling.keyed import BLOCK
from paceline.sampling.noise import signed64
from paceline.sampling.soft import SoftNodes

VOCABULARIES = (1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 9 * BLOCK + 17)
RUN_SEEDS = (0, 1, (1 << 32) - 1, (1 << 63) + 12345)
#: By how much block sums in a dtype may differ from the reference, relative to the largest.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}


@dataclass(frozen=True)
class Vector:
    """Logits (N, V) and the keys of their noise."""

    name: str
    logits_NV: torch.Tensor
    run_seed: int
    seeds_N: torch.Tensor
    positions_N: torch.Tensor


@dataclass(frozen=True)
class SoftVector:
    """Chains of drawn tokens on top of a ``Vector``; ``soft`` holds point masses where ``has_points``."""

    vector: Vector
    soft: SoftNodes
    chain_M: np.ndarray
    depth_M: np.ndarray
    has_points: bool


def vectors() -> list[Vector]:
    """Every vocabulary with every shape of logits, in one precision after the other, and half precision."""
    found = []
    for number, vocabulary in enumerate(VOCABULARIES):
        for kind, shape in enumerate(("plain", "masked", "extreme", "half")):
            dtype = torch.bfloat16 if shape == "half" else (torch.float64, torch.float32)[(number + kind) % 2]
            logits_NV = _logits(shape, 3, vocabulary, number).to(dtype)
            name = f"{shape}, V {vocabulary}, {dtype}"
            found.append(_vector(name, logits_NV, RUN_SEEDS[number % len(RUN_SEEDS)]))
    return found


def soft_vectors() -> list[SoftVector]:
    """Drafts in every mix of precisions; laws that exclude tokens, that are near the policy's, and equal to it."""
    double, single, half = torch.float64, torch.float32, torch.bfloat16
    precisions = {3: [(double, double)], 700: [(single, double), (half, single)]}
    precisions[9 * BLOCK + 17] = [(double, double), (single, single)]
    found = []
    for vocabulary, pairs in precisions.items():
        for dtypes in pairs:
            for shape in ("plain", "masked", "extreme", "near", "equal"):
                for has_points in (False, True) if shape == "masked" else (False,):
                    name = f"{shape}, V {vocabulary}, {dtypes}, {'with' if has_points else 'no'} point masses"
                    found.append(_soft(name, shape, vocabulary, dtypes, has_points, vocabulary))
    return found


def _vector(name: str, logits_NV: torch.Tensor, run_seed: int) -> Vector:
    n = len(logits_NV)
    seeds = [signed64((1 << 63) * (i % 2) + (1 << 33) * i + i) for i in range(n)]
    positions = [(0, 1, 7, (1 << 32) - 1)[i % 4] for i in range(n)]
    return Vector(name, logits_NV, run_seed, torch.tensor(seeds), torch.tensor(positions))


def _logits(shape: str, rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits_NV = 3 * torch.randn(rows, vocabulary, dtype=torch.float64, generator=generator)
    if shape == "extreme":
        # One token far above all others, a whole row out of the range of exp, and one of equal logits.
        logits_NV[0, seed % vocabulary] = 1e4
        logits_NV[1] -= 3e4
        logits_NV[2] = 0.0
    if shape == "masked":
        logits_NV[torch.rand(rows, vocabulary, generator=generator) < 0.5] = -torch.inf
        logits_NV[0, : BLOCK * (vocabulary // BLOCK // 2)] = -torch.inf
        logits_NV[1] = -torch.inf
        logits_NV[:, -1] = 0.0  # every row keeps a token, row 1 only this one
    return logits_NV


def _soft(
    name: str, shape: str, vocabulary: int, dtypes: tuple[torch.dtype, torch.dtype], has_points: bool, seed: int
) -> SoftVector:
    """Two chains of three nodes over four positions each, drawn from the same laws."""
    chains, length = 2, 3
    base = "plain" if shape in ("near", "equal") else shape
    logits_NV = _logits(base, chains * (length + 1), vocabulary, seed).to(dtypes[0])
    parent_M = np.concatenate([np.arange(length) + chain * (length + 1) for chain in range(chains)])
    laws_LV = _logits(base, length, vocabulary, seed + 100)
    law_M = np.arange(chains * length) % len(laws_LV)
    if shape in ("near", "equal"):
        laws_LV = logits_NV[torch.from_numpy(parent_M[: len(laws_LV)])].double()
        if shape == "near":
            laws_LV += 1e-3 * torch.randn(laws_LV.shape, dtype=torch.float64)
    laws_LV = laws_LV.to(dtypes[1])
    generator = torch.Generator().manual_seed(seed)
    token_M = torch.multinomial(laws_LV.double().softmax(-1)[law_M], 1, generator=generator)[:, 0].numpy()
    if has_points:
        law_M = np.where(np.arange(len(law_M)) % 3 == 1, -1, law_M)
    soft = SoftNodes(parent_M + 1, parent_M, token_M, law_M, np.zeros_like(law_M), laws_LV)
    chain_M, depth_M = np.divmod(np.arange(chains * length), length)
    return SoftVector(_vector(name, logits_NV, 5), soft, chain_M, depth_M + 1, has_points)
