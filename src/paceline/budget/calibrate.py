"""How likely drafted nodes are accepted: learned from outcomes, also for drafters that claim nothing or too much.

A node is *tested* when its parent was accepted (or it follows the committed tokens): only then did the policy's sample
decide about it. Tested nodes are nearly independent trials, so shares of tested nodes are learned, and a node's path
probability is the product of the shares on its path.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.budget.allocate import PRIOR_ACCEPTANCE, Floats, Indices, Nodes
from paceline.budget.steptime import isotonic
from paceline.schema import SOURCES

_DEPTHS = 16
_CLAIMS = 10
_MODEL = SOURCES.index("model")
#: A class of nodes forgets: the evidence of a pass fades with this factor a pass, and never exceeds so many trials.
_FADE = 1 - 1 / 64
_MOST_TRIALS = 256.0
#: Pseudo-trials with which a class starts from its prior.
_PRIOR_TRIALS = 2.0
#: The map from claims to what is believed is made anew after so many passes, at first after each.
_MAPPED_EVERY = 4


class Calibrator:
    """Accepted shares by (depth, source) for drafts without probabilities, by decile of the claim for those with.

    A draft's claims are checked on the conditional probabilities p(node) / p(parent). The corrected ones are an
    isotonic function of the claimed ones, so a drafter that claims 1 and is never right is believed for a few passes.
    What a model claims is its own law, which errs in other ways than the counts of a history, so models have a function
    of their own.
    """

    def __init__(self) -> None:
        self._unclaimed = _Shares((_DEPTHS, len(SOURCES)))
        self._claimed = _Shares((2, _CLAIMS))  # of others, and of models
        self._claims = np.zeros((2, _CLAIMS))  # sum of the claims of the trials in each decile
        self._maps: list[tuple[Floats, Floats]] | None = None
        self._passes = self._news = 0  # observed passes, and those that the map does not know yet

    def probs(self, nodes: Nodes) -> Floats:
        """Calibrated path probabilities of the nodes, never growing down a path."""
        if not len(nodes):
            return np.empty(0)
        claims_N = nodes.claims_N
        if self._maps is None or self._news >= min(_MAPPED_EVERY, 1 + self._passes // 32):
            self._maps, self._news = [self._correction(of_model) for of_model in (0, 1)], 0
        shares_N = np.interp(claims_N, *self._maps[0])
        is_model_N = nodes.sources_N == _MODEL
        if is_model_N.any():
            shares_N = np.where(is_model_N, np.interp(claims_N, *self._maps[1]), shares_N)
        is_unclaimed_N = np.isnan(claims_N)
        if is_unclaimed_N.any():
            shares_N = np.where(is_unclaimed_N, self._by_depth()[self._cells(nodes)], shares_N)
        return nodes.path_products(shares_N)

    def observe(self, nodes: Nodes, accepted: Sequence[Indices], cut: Sequence[bool]) -> None:
        """What became of verified nodes: own indices of the accepted ones a draft, in the order of the path.

        ``cut`` says that the response ended on the last accepted node, so that nobody knows about its children. Both
        have one entry a draft.
        """
        if not len(nodes):
            return
        is_accepted_N, is_open_N = np.zeros(len(nodes), dtype=bool), np.ones(len(nodes), dtype=bool)
        depths = [len(path) for path in accepted]
        reached = np.concatenate([*accepted, np.empty(0, dtype=np.int64)]) + np.repeat(nodes.starts[:-1], depths)
        is_accepted_N[reached] = True
        is_open_N[reached[np.cumsum(depths)[(np.array(depths) > 0) & np.asarray(cut, dtype=bool)] - 1]] = False
        is_tested_N = nodes.tops() | (is_accepted_N & is_open_N)[nodes.parent_N]
        claims_N = nodes.claims_N
        tested = np.flatnonzero(is_tested_N & np.isnan(claims_N))
        if len(tested):
            depth_N, source_N = self._cells(nodes)
            self._unclaimed.add((depth_N[tested], source_N[tested]), is_accepted_N[tested])
        tested = np.flatnonzero(is_tested_N & ~np.isnan(claims_N))
        if len(tested):
            cells = (nodes.sources_N[tested] == _MODEL).astype(np.int64), _decile(claims_N[tested])
            kept = self._claimed.add(cells, is_accepted_N[tested])
            self._claims *= kept
            np.add.at(self._claims, cells, claims_N[tested])
            self._passes += 1
            self._news += 1

    def loosen(self) -> None:
        """The policy moved: what was learned counts half."""
        for shares in (self._unclaimed, self._claimed):
            shares.trials /= 2
            shares.hits /= 2
        self._claims /= 2
        self._maps = None

    def reliability(self, *, of_model: bool = False) -> list[tuple[float, float, float]]:
        """By decile of the claimed conditional probability: mean claim, accepted share, recent trials (faded).

        The claims are those of models with ``of_model``, else those of all others.
        """
        claims, trials, hits = (
            each[int(of_model)] for each in (self._claims, self._claimed.trials, self._claimed.hits)
        )
        return [
            (float(claims[d] / trials[d]), float(hits[d] / trials[d]), float(trials[d]))
            for d in np.flatnonzero(trials > 0)
        ]

    def state(self) -> dict[str, Any]:
        """Everything learned, as plain numbers."""
        arrays: dict[str, Floats] = {"claims": self._claims}
        for name, shares in (("unclaimed", self._unclaimed), ("claimed", self._claimed)):
            arrays |= {f"{name}_trials": shares.trials, f"{name}_hits": shares.hits}
        return {name: array.tolist() for name, array in arrays.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` gave, also of a version with fewer sources; ValueError or KeyError for others."""
        loaded = {}
        for name, own in self.state().items():
            loaded[name] = _widened(np.array(state[name], dtype=np.float64), np.shape(own))
            if loaded[name].shape != np.shape(own) or not np.isfinite(loaded[name]).all():
                raise ValueError(f"the calibration's {name} has shape {loaded[name].shape} or is not finite")
        self._claims, self._maps = loaded["claims"], None
        for name, shares in (("unclaimed", self._unclaimed), ("claimed", self._claimed)):
            shares.trials, shares.hits = loaded[f"{name}_trials"], loaded[f"{name}_hits"]

    def _cells(self, nodes: Nodes) -> tuple[Indices, npt.NDArray[np.uint8]]:
        return np.minimum(nodes.depths(), _DEPTHS) - 1, nodes.sources_N

    def _by_depth(self) -> Floats:
        """Shares by depth and source; a cell starts from its source's share, a source from the prior."""
        whole = self._unclaimed
        of_source = (whole.hits.sum(0) + _PRIOR_TRIALS * PRIOR_ACCEPTANCE) / (whole.trials.sum(0) + _PRIOR_TRIALS)
        shares: Floats = (whole.hits + _PRIOR_TRIALS * of_source) / (whole.trials + _PRIOR_TRIALS)
        return shares

    def _correction(self, of_model: int) -> tuple[Floats, Floats]:
        """Knots of the isotonic map from claimed to corrected shares; each decile starts as claimed."""
        claims, trials, hits = (each[of_model] for each in (self._claims, self._claimed.trials, self._claimed.hits))
        centres = (np.arange(_CLAIMS) + 0.5) / _CLAIMS
        centres[-1] = 1.0
        knots = (claims + _PRIOR_TRIALS * centres) / (trials + _PRIOR_TRIALS)
        shares = isotonic((hits + _PRIOR_TRIALS * centres) / (trials + _PRIOR_TRIALS), trials + 0.1)
        return np.concatenate([[0.0], knots]), np.concatenate([[0.0], shares])


class _Shares:
    """Trials and hits of classes of nodes, fading."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.trials = np.zeros(shape)
        self.hits = np.zeros(shape)

    def add(self, cells: tuple[npt.NDArray[Any], ...], is_hit: npt.NDArray[np.bool_]) -> Floats:
        """Count tested nodes by class; returns the factor by which each class's older evidence was reduced."""
        new = np.zeros_like(self.trials)
        np.add.at(new, cells, 1.0)
        most_old = np.maximum(_MOST_TRIALS - new, 0.0)
        kept: Floats = np.where(new > 0, np.minimum(_FADE, most_old / np.maximum(self.trials, 1e-12)), 1.0)
        self.trials = self.trials * kept + new
        self.hits *= kept
        np.add.at(self.hits, cells, is_hit.astype(np.float64))
        return kept


def _widened(old: Floats, shape: tuple[int, ...]) -> Floats:
    """What a version wrote that knew fewer sources, or no claims of models, with zeros for what it did not know."""
    if shape == (2, _CLAIMS) and old.shape == (_CLAIMS,):
        return np.stack([old, np.zeros(_CLAIMS)])
    if shape[0] == _DEPTHS and old.ndim == 2 and old.shape[0] == _DEPTHS and old.shape[1] < shape[1]:
        return np.pad(old, [(0, 0), (0, shape[1] - old.shape[1])])
    return old


def _decile(claims: Floats) -> Indices:
    return np.minimum((claims * _CLAIMS).astype(np.int64), _CLAIMS - 1)
