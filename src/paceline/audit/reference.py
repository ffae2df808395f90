"""The law of one position written out a second time, in the plainest way: the oracle that an audit compares with.

It shares no code with ``sampling.processors``, so that a mistake there cannot hide here. Everything is float64.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.schema import PacelineError, SamplingParams, Tokens

Floats = npt.NDArray[np.float64]


def reference_law(
    logits_V: npt.ArrayLike, params: SamplingParams, prompt: Tokens, response: Tokens, stop_ids: Sequence[int] = ()
) -> Floats:
    """The probabilities (V,) of the token that follows ``prompt`` and ``response``, given its raw logits.

    The order is that of ``SamplingParams``. At temperature 0 it is a point mass on the first of the largest logits.
    Entries that equal the last one kept by ``min_p`` or ``top_k`` are kept too; ``top_p`` breaks ties by token id.
    Raises PacelineError where no token is left, and for a grammar, which it does not follow.
    """
    if params.grammar is not None:
        raise PacelineError("the reference law follows no grammar; compare without one, and check that responses parse")
    z_V = np.array(logits_V, dtype=np.float64)
    _mask(z_V, params, prompt, response, stop_ids)
    for token, bias in params.logit_bias.items():
        z_V[token] += bias
    _penalise(z_V, params, prompt, response)
    if not (z_V > -np.inf).any():
        raise PacelineError(f"no token may follow the {len(response)} tokens of the response; loosen the parameters")
    if params.temperature == 0:
        law_V = np.zeros_like(z_V)
        law_V[z_V.argmax()] = 1.0
        return law_V
    law_V = softmax(z_V / params.temperature)
    if params.min_p > 0:
        law_V = _kept(law_V, law_V >= params.min_p * law_V.max())
    if params.top_k > 0:
        least = np.sort(law_V)[::-1][min(params.top_k, len(law_V)) - 1]
        law_V = _kept(law_V, law_V >= least)
    if params.top_p < 1:
        order = np.argsort(-law_V, kind="stable")
        # The smallest set whose sum reaches top_p: a token is in it while those before it have not reached it.
        before = np.concatenate([[0.0], np.cumsum(law_V[order])[:-1]])
        keep_V = np.zeros(len(law_V), dtype=bool)
        keep_V[order[before < params.top_p]] = True
        law_V = _kept(law_V, keep_V)
    return law_V


def reference_laws(
    logits_TV: npt.ArrayLike, params: SamplingParams, prompt: Tokens, response: Tokens, stop_ids: Sequence[int] = ()
) -> Floats:
    """The laws (T, V) of all T positions of a response, each given the tokens before it (teacher forcing)."""
    rows = np.asarray(logits_TV, dtype=np.float64)
    return np.stack([reference_law(row, params, prompt, response[:t], stop_ids) for t, row in enumerate(rows)])


def softmax(logits: Floats) -> Floats:
    """Probabilities along the last axis."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _mask(z_V: Floats, params: SamplingParams, prompt: Tokens, response: Tokens, stop_ids: Sequence[int]) -> None:
    if params.allowed_token_ids is not None:
        allowed = np.zeros(len(z_V), dtype=bool)
        allowed[list(params.allowed_token_ids)] = True
        z_V[~allowed] = -np.inf
    if params.bad_words:
        longest = max(len(word) for word in params.bad_words)
        text = [*prompt[-longest:].tolist(), *response[-longest:].tolist()]
        for *start, last in params.bad_words:
            if len(start) <= len(text) and text[len(text) - len(start) :] == start:
                z_V[last] = -np.inf
    if len(response) < params.min_tokens:
        z_V[list(stop_ids)] = -np.inf


def _penalise(z_V: Floats, params: SamplingParams, prompt: Tokens, response: Tokens) -> None:
    if params.repetition_penalty != 1:
        seen = list({*prompt.tolist(), *response.tolist()})
        z_V[seen] = np.where(
            z_V[seen] > 0, z_V[seen] / params.repetition_penalty, z_V[seen] * params.repetition_penalty
        )
    if params.presence_penalty or params.frequency_penalty:
        count_V = np.bincount(response, minlength=len(z_V))
        z_V -= params.presence_penalty * (count_V > 0) + params.frequency_penalty * count_V


def _kept(law_V: Floats, keep_V: npt.NDArray[np.bool_]) -> Floats:
    law_V = np.where(keep_V, law_V, 0.0)
    return law_V / law_V.sum()
