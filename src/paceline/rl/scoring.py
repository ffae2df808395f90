"""The log-probabilities that a model gives to rollouts, differentiable, with every shared prefix computed once."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from paceline.cotrain.taps import Collector
from paceline.forward.layers import decoder_layers
from paceline.rl import packing
from paceline.schema import Tokens, as_tokens

# Logits of this many elements (64 MB in float32) are made at a time, so that temporaries stay small.
_CHUNK_ELEMENTS = 1 << 24


class Scorer:
    """Scores rollouts under ``model``: logits only where a response token is predicted, gradients only where asked for.

    Where the model allows it (``shares_prefixes``), rollouts of one prompt are scored as a prefix tree.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._text = model.config.get_text_config()

    def logprobs(
        self,
        prompts: Sequence[Tokens],
        responses: Sequence[Tokens],
        temperature: float,
        collector: Collector | None = None,
        wanted: Collection[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of every response token, and the entropy (detached) of the law it was drawn from.

        Both are (N,), response after response, in float32 at least; the law is softmax(logits / temperature). A
        ``collector`` sees the pass and keeps the rollouts ``wanted`` (None: all); it changes nothing.
        """
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}: log-probabilities of a sampled law need a temperature > 0")
        packed = packing.pack(self.trees(prompts, responses), responses)
        nodes_U, node_of_N = np.unique(packed.predictor_N, return_inverse=True)
        # One log-probability for each (node, token) that occurs: siblings that agree share it.
        vocabulary = self._text.vocab_size
        pairs_P, pair_of_N = np.unique(node_of_N * vocabulary + packed.target_N, return_inverse=True)
        node_P, token_P = np.divmod(pairs_P, vocabulary)
        rows = max(1, _CHUNK_ELEMENTS // vocabulary)
        logprobs, entropies = [], []
        for start, logits_UV in self._logits(packed, nodes_U, rows, collector):
            logprobs_UV = (logits_UV.to(torch.promote_types(logits_UV.dtype, torch.float32)) / temperature).log_softmax(
                -1
            )
            left, right = np.searchsorted(node_P, [start, start + rows])
            logprobs.append(logprobs_UV[self._index(node_P[left:right] - start), self._index(token_P[left:right])])
            entropies.append(_entropy(logprobs_UV.detach()))
        if collector is not None:
            collector.keep(prompts, responses, packed.predictor_N, wanted)
        return (
            torch.cat(logprobs).index_select(0, self._index(pair_of_N)),
            torch.cat(entropies).index_select(0, self._index(node_of_N)),
        )

    def trees(
        self, prompts: Sequence[Tokens], responses: Sequence[Tokens], max_nodes: int | None = None
    ) -> list[packing.Tree]:
        """The prefix trees (chains where nothing is shared) in which the rows are computed."""
        share = self.shares_prefixes
        return packing.build_trees(prompts, responses, self.attention_cost if share else 0.0, max_nodes, share)

    @cached_property
    def attention_cost(self) -> float:
        """Attention's work for one (query, key) pair over the work of a token's matrix products, in one layer."""
        text = self._text
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        _, layers = decoder_layers(self.model)
        weights = sum(parameter.numel() for parameter in layers[-1].parameters() if parameter.ndim == 2)
        return 2 * head * text.num_attention_heads / weights

    @cached_property
    def shares_prefixes(self) -> bool:
        """Whether the model scores a prefix tree as it scores the rollouts one by one; tried once on a small tree.

        Architectures with a running state, masks of their own or an unusual head do not: they get plain rows.
        """
        prompt = as_tokens(np.arange(1, 4) % self._text.vocab_size)
        responses = [as_tokens(np.array(ids) % self._text.vocab_size) for ids in ([4, 5, 6], [4, 5, 7, 8], [9, 6])]
        chains, trees = (
            packing.pack(packing.build_trees([prompt] * 3, responses, 0.0, share=share), responses)
            for share in (False, True)
        )
        with torch.no_grad():
            whole_NV = self._whole_logits(chains, chains.predictor_N)
            try:
                tree_NV = self._head(self._hidden(trees, trees.predictor_N))
            except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError):
                return False  # the model refuses a mask or positions of ours
        apart = (whole_NV.double().log_softmax(-1) - tree_NV.double().log_softmax(-1)).abs().max()
        return bool(apart < (0.25 if self.model.dtype in (torch.bfloat16, torch.float16) else 1e-3))

    def _logits(
        self, packed: packing.Packed, nodes_U: npt.NDArray[np.int64], rows: int, collector: Collector | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Logits of the flattened nodes ``nodes_U``, ``rows`` at a time, each time with the index of the first."""
        shares = self.shares_prefixes  # tried before anybody watches
        with nullcontext() if collector is None else collector.watching():
            if shares:
                rows_UX, head = self._hidden(packed, nodes_U), self._head
            else:
                rows_UX, head = self._whole_logits(packed, nodes_U), torch.nn.Identity()
        for start in range(0, len(nodes_U), rows):
            yield start, head(rows_UX[start : start + rows])

    def _whole_logits(self, packed: packing.Packed, nodes_U: npt.NDArray[np.int64]) -> Tensor:
        """By the model's own forward pass over plain rows, the definition of right; also makes the prompts' logits."""
        logits_BLV = self.model(input_ids=self._index(packed.ids_BL), use_cache=False).logits
        return logits_BLV.flatten(0, 1).index_select(0, self._index(nodes_U))

    def _hidden(self, packed: packing.Packed, nodes_U: npt.NDArray[np.int64]) -> Tensor:
        """Final hidden states, (U, D)."""
        extra: dict[str, Any] = {}
        if packed.mask_BLL is not None:
            extra = {"attention_mask": self._masks(packed), "position_ids": self._index(packed.positions_BL)}
        output = self.model.get_decoder()(input_ids=self._index(packed.ids_BL), use_cache=False, **extra)
        return output.last_hidden_state.flatten(0, 1).index_select(0, self._index(nodes_U))

    def _head(self, hidden_UD: Tensor) -> Tensor:
        logits_UV = self.model.get_output_embeddings()(hidden_UD)
        cap = getattr(self._text, "final_logit_softcapping", None)
        return logits_UV if cap is None else torch.tanh(logits_UV / cap) * cap

    def _masks(self, packed: packing.Packed) -> Tensor | dict[str, Tensor]:
        """The tree's mask, or one for each kind of layer where some look back over a window only.

        A window counts positions, so siblings do not push each other's prefix out of sight.
        """
        assert packed.mask_BLL is not None
        window = getattr(self._text, "sliding_window", None)
        kinds = set(getattr(self._text, "layer_types", None) or ())
        if kinds - {"full_attention", "sliding_attention"}:
            raise ValueError(f"layers of the kinds {sorted(kinds)} take no mask of ours")
        full = packed.mask_BLL
        if window is None or kinds == {"full_attention"}:
            return self._mask(full)
        distance_BLL = packed.positions_BL[:, :, None] - packed.positions_BL[:, None, :]
        windowed = self._mask(full & (distance_BLL < window))
        return {"full_attention": self._mask(full), "sliding_attention": windowed} if kinds else windowed

    def _mask(self, allowed_BLL: npt.NDArray[np.bool_]) -> Tensor:
        """As the attention in use wants it: SDPA takes booleans, others add the mask to their scores."""
        allowed_B1LL = torch.from_numpy(allowed_BLL).to(self.model.device)[:, None]
        if self.model.config._attn_implementation == "sdpa":
            return allowed_B1LL
        barred = torch.finfo(self.model.dtype).min
        return torch.zeros(allowed_B1LL.shape, dtype=self.model.dtype, device=self.model.device).masked_fill_(
            ~allowed_B1LL, barred
        )

    def _index(self, values: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.model.device)


def token_logprobs(
    head: nn.Module, states_UH: Tensor, token_U: Tensor, temperature: float, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Log-probability of a token under the law at each state, and that law's entropy (detached), (U,) each.

    In float32 at least; the law is softmax(logits / temperature). Logits exist for a chunk of rows at a time, backwards
    too, where ``head`` makes them again.
    """

    def of(states_RH: Tensor, token_R: Tensor) -> tuple[Tensor, Tensor]:
        logits_RV = head(states_RH)
        law_RV = (logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)) / temperature).log_softmax(-1)
        return law_RV.gather(1, token_R[:, None])[:, 0], _entropy(law_RV.detach())

    rows = max(1, _CHUNK_ELEMENTS // vocabulary)
    chunks = zip(states_UH.split(rows), token_U.split(rows), strict=True)
    logprobs, entropies = zip(*(checkpoint(of, *chunk, use_reentrant=False) for chunk in chunks), strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _entropy(logprobs_UV: Tensor) -> Tensor:
    """Entropy of each row in nats; a token of probability 0 adds nothing."""
    lowest = torch.finfo(logprobs_UV.dtype).min
    return -(logprobs_UV.exp() * logprobs_UV.clamp_min(lowest)).sum(-1)
