"""Makes a head for a policy: from files, from the policy's own last layer, or from nothing."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.config import HeadConfig
from paceline.drafters.heads.base import Head, HeadKind
from paceline.drafters.heads.block import BlockHead, block_taps
from paceline.drafters.heads.eagle3 import Eagle3Head
from paceline.drafters.heads.llama import llama_config
from paceline.drafters.heads.load import load_head
from paceline.drafters.heads.mtp import MtpHead, layout_of
from paceline.drafters.heads.native import native_head
from paceline.forward.layers import decoder_layers
from paceline.forward.pretrained import ModelError
from paceline.schema import derive_seed


def make_head(
    kind: HeadKind, config: HeadConfig, policy: PreTrainedModel, seed: int, counts: npt.NDArray[np.int64] | None = None
) -> Head:
    """A head of ``kind``, bound to ``policy``, on its device and in ``config.dtype``.

    It is in evaluation mode and no gradients are asked for.

    What starts at random is a function of ``seed``. ``counts``, (V,), say how often each token of the policy occurs,
    for the draft vocabulary. Raises ModelError for settings that the policy cannot meet and for files that do not fit.
    """
    head: Head
    if kind == "mtp":
        head = _mtp(config, policy, seed)
    elif config.path is not None:
        head = load_head(kind, config, policy, default_taps(len(decoder_layers(policy)[1])))
    elif kind == "block":
        head = _block(config, policy, seed)
    else:
        head = _eagle3(config, policy, seed, counts)
    head.bind(policy)
    head.to(device=policy.device, dtype=getattr(torch, config.dtype))
    return head.eval().requires_grad_(False)


def choose_vocabulary(counts: npt.NDArray[np.int64] | None, size: int, policy: PreTrainedModel) -> Tensor | None:
    """The policy's ``size`` most frequent tokens, rising, (Vd,) int64; None for all of them (0, or as many as all).

    What ends a text is always among them, and of equally frequent tokens the lower ids, which in a byte-pair vocabulary
    are the older merges: so without ``counts`` the lowest ids.
    """
    text = policy.config.get_text_config()
    whole = int(text.vocab_size)
    if size == 0 or size >= whole:
        return None
    rank = np.zeros(whole, np.int64) if counts is None else np.asarray(counts, np.int64).copy()
    ends = [text.eos_token_id, getattr(policy.generation_config, "eos_token_id", None)]
    for end in ends:
        rank[[] if end is None else end] = np.iinfo(np.int64).max
    return torch.from_numpy(np.sort(np.argsort(-rank, kind="stable")[:size]))


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice of three layers, low, middle and high; of a shallow policy those before its last, each once."""
    if layers < 7:
        return tuple(range(max(layers - 4, 0), max(layers - 1, 1)))
    return 1, layers // 2 - 1, layers - 4


def _eagle3(config: HeadConfig, policy: PreTrainedModel, seed: int, counts: npt.NDArray[np.int64] | None) -> Eagle3Head:
    _, layers = decoder_layers(policy)
    vocabulary = choose_vocabulary(counts, config.vocabulary, policy)
    taps = config.taps or default_taps(len(layers))
    head = Eagle3Head(llama_config(policy, config.layers), taps, vocabulary)
    randomise(head, derive_seed("head", seed))
    if config.init == "policy":
        head.start_from(policy)
    return head


def _mtp(config: HeadConfig, policy: PreTrainedModel, seed: int) -> MtpHead:
    if config.vocabulary or config.layers != 1 or config.taps:
        raise ModelError(
            "drafter.head: an mtp head is one layer on the policy's final state, with its output matrix; "
            "leave vocabulary, layers and taps as they are"
        )
    head = native_head(policy, config.path)
    if head is None and config.path is not None:
        raise ModelError(f"drafter.head.path={config.path}: no multi-token-prediction head of a policy like this one")
    if head is None:
        head = MtpHead(policy, layout_of(policy))
        randomise(head, derive_seed("head", seed))
        if config.init == "policy":
            head.start_from(policy)
    return head


def _block(config: HeadConfig, policy: PreTrainedModel, seed: int) -> BlockHead:
    if config.vocabulary:
        raise ModelError(
            f"drafter.head.vocabulary={config.vocabulary}: a block head has the policy's output matrix; set it to 0"
        )
    _, layers = decoder_layers(policy)
    head = BlockHead(llama_config(policy, config.layers), config.taps or block_taps(len(layers)), config.block)
    randomise(head, derive_seed("head", seed))
    embeddings = policy.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)
    with torch.no_grad():
        head.mask_embedding.copy_(embeddings.mean(0))
    if config.init == "policy":
        head.start_from(list(layers))
    return head


def randomise(module: nn.Module, seed: int, std: float = 0.02) -> None:
    """Normal weights of deviation ``std``, a function of ``seed``; biases are 0, and norms as they were made."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(std))
            elif name.endswith("bias"):
                parameter.zero_()
