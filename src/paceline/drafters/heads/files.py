"""Heads on disk: what a directory that was made for vLLM, SGLang or speculators says, in paceline's terms.

A tap is the output of a layer, counted from 0. Files count otherwise: ``eagle_aux_hidden_state_layer_ids`` at the top
of ``config.json``, which vLLM and speculators read, names k + 1 for it (the layer that takes it in), and the same key
in ``eagle_config``, which SGLang reads, names k. vLLM falls back on the second and takes it for the first: a directory
that has only the second means different layers to the two engines, and is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import LlamaConfig

from paceline.drafters.heads.base import HeadKind
from paceline.files import aside_of, exact_numbers, file_hash, named, read_json_object
from paceline.forward.model_files import (
    ModelError,
    check_finite,
    check_settings,
    check_token_ids,
    foreign,
    model_source,
    no_progress_bars,
    read_tensors,
    weight_files,
)
from paceline.forward.taps import FINAL

#: What paceline writes beside the engines' own files, last: who made it of what, and the hash of every other file.
METADATA = "paceline.json"
CONFIG, WEIGHTS, WEIGHTS_INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
#: What a tap is called in a file, less its number among layers' outputs.
TAP_OFFSETS: Mapping[str, int] = {"vllm": 1, "sglang": 0, "speculators": 1}
#: The mask's embedding as DFlash checkpoints have it: a pickle, which vLLM reads and paceline only writes.
MASK_FILE = "mask_embedding.pt"
IDS = "eagle_aux_hidden_state_layer_ids"
Format = Literal["vllm", "sglang", "speculators"]

#: Switches of other heads that would compute something else from the same weights, and what they must say.
_PLAIN: Mapping[str, Any] = {
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "attention_bias": False,
    "mlp_bias": False,
    "logit_scale": 1.0,
}
#: Switches of block heads, at the top or in ``dflash_config``.
_PLAIN_BLOCK: Mapping[str, Any] = {
    "attention_bias": False,
    "logit_scale": 1.0,
    "causal": False,
    "use_swa": False,
    "use_sliding_window": False,
    "sample_from_anchor": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
}


@dataclass(frozen=True)
class Stored:
    """A head as files hold it: its layers' configuration, its taps, and its weights by ``Head.checkpoint``'s names.

    ``taps`` None: the files do not say. It was made for ``version`` of the model that ``policy`` names, which has
    ``policy_layers`` layers (0: the files do not say). A block head drafts ``block`` tokens.
    """

    kind: HeadKind
    config: LlamaConfig
    taps: tuple[int, ...] | None
    tensors: dict[str, Tensor] = field(repr=False)
    policy: str = ""
    version: int = 0
    policy_layers: int = 0
    block: int = 0


def read_head(path: str | Path, taps: tuple[int, ...] = ()) -> Stored:
    """The head in a directory or of a hub id, whoever wrote it; ``taps`` go before what its files say.

    ModelError, one line, for what is no such directory, was not written to the end, has no safetensors, or is a head
    that paceline has no counterpart of, by the key that says so.
    """
    folder = _folder(path)
    metadata = _metadata(folder)
    config = exact_numbers(read_json_object(folder / CONFIG))
    tensors = _tensors(folder)
    with foreign(f"{named(folder / CONFIG)}: not a head's configuration"):
        return _stored(folder, metadata, config, tensors, taps)


def _stored(
    folder: Path,
    metadata: Mapping[str, Any],
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    taps: tuple[int, ...],
) -> Stored:
    """The head that these files hold; whatever is malformed may raise whatever it makes of it."""
    if "speculators_model_type" in config:
        config = {"norm_before_residual": True, **config, **config.get("transformer_layer_config", {})}
        tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
    check_settings(config, folder / CONFIG, len(tensors))
    check_token_ids(config, folder / CONFIG)
    kind = _kind(config, folder)
    if kind == "mtp":
        return Stored(kind, LlamaConfig(), (FINAL,), tensors, **_origin(metadata))
    if kind == "block":
        _refuse_other_blocks(config, tensors, folder)
    else:
        _refuse_others(config, folder)
    if metadata and not taps:
        taps = tuple(int(tap) for tap in metadata["taps"])
    return Stored(
        kind=kind,
        config=_layers(config, tensors),
        taps=taps or _taps(config, folder),
        tensors=_without_identity(tensors, int(config["vocab_size"])),
        block=int(config["block_size"]) - 1 if kind == "block" else 0,
        **_origin(metadata),
    )


def _origin(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the head was made for."""
    return {
        "policy": str(metadata.get("policy", "")),
        "version": int(metadata.get("version", 0)),
        "policy_layers": int(metadata.get("policy_layers", 0)),
    }


def _folder(path: str | Path) -> Path:
    with foreign(named(path)):
        folder = Path(path).expanduser()
        if not folder.exists() and aside_of(folder).is_dir():
            folder = aside_of(folder)  # a process was killed while it replaced the head
        if folder.is_dir():
            if not (folder / CONFIG).is_file():
                raise ModelError(f"{named(path)}: no {CONFIG} in this directory; give the directory of a head")
            return folder
    source = model_source(str(path), "drafter.head.path")
    from huggingface_hub import snapshot_download

    with foreign(f"{named(path)}: cannot be fetched from the hub"), no_progress_bars():
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors"]))


def _metadata(folder: Path) -> dict[str, Any]:
    """What paceline said of the directory, once every file has the hash that it had; empty where another wrote it."""
    if not (folder / METADATA).is_file():
        return {}
    metadata = read_json_object(folder / METADATA)
    files = metadata.get("files")
    if not isinstance(files, dict):
        raise ModelError(f"{named(folder / METADATA)}: lists no files; export the head again")
    for name, expected in files.items():
        with foreign(named(folder / name)):
            is_whole = Path(name).name == name and (folder / name).is_file() and file_hash(folder / name) == expected
        if not is_whole:
            where = named(folder / name)
            raise ModelError(f"{where}: not the file that {METADATA} was written for; export the head again")
    with foreign(f"{named(folder / METADATA)}: not what a head was made for"):
        _origin(metadata)
        if not all(type(tap) is int for tap in metadata["taps"]):
            raise ModelError(f"{named(folder / METADATA)}: taps must be numbers of layers")
    return metadata


def _tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors = read_tensors(file)
        check_finite({name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}, named(file))
        found.update(tensors)
    return found


def _kind(config: Mapping[str, Any], folder: Path) -> HeadKind:
    named = str(config.get("speculators_model_type", next(iter(config.get("architectures") or ()), ""))).lower()
    if "eagle3" in named:
        return "eagle3"
    if named == "mtphead":
        return "mtp"
    if named == "dflashdraftmodel":
        return "block"
    raise ModelError(
        f"{folder / CONFIG}: {named or 'no architecture'} is no head that paceline knows; it knows EAGLE-3 and DFlash"
    )


def _refuse_others(config: Mapping[str, Any], folder: Path) -> None:
    """ModelError where the same weights mean another computation than ours."""
    for key, plain in _PLAIN.items():
        if (config.get(key) or plain) != plain:
            raise ModelError(
                f"{folder / CONFIG}: {key}={config[key]!r}, and paceline's head has {plain!r}; train another"
            )
    if config.get("model_type", "llama") != "llama":
        raise ModelError(f"{folder / CONFIG}: layers of {config['model_type']}, and paceline's heads are Llama's")
    width = config.get("target_hidden_size") or config["hidden_size"]
    if width != config["hidden_size"]:
        raise ModelError(f"{folder / CONFIG}: target_hidden_size={width} for a head of {config['hidden_size']}")
    if not (config.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        raise ModelError(f"{folder / CONFIG}: use_aux_hidden_state=false: a head of the last state only")


def _refuse_other_blocks(config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """ModelError where a DFlash head is not one that paceline has, or its files lack what it needs."""
    within = config.get("dflash_config") or {}
    for given, plain in ((config, _PLAIN_BLOCK), (within, _PLAIN_BLOCK)):
        for key, value in plain.items():
            if given.get(key, value) not in (value, None):
                raise ModelError(
                    f"{folder / CONFIG}: {key}={given[key]!r}, and paceline's block head has {value!r}; train another"
                )
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if config.get("model_type") != "qwen3" or kinds:
        what = sorted(kinds) or config.get("model_type")
        raise ModelError(f"{folder / CONFIG}: layers of {what}, and a block head's are Qwen3's; train another")
    if config.get("draft_vocab_size") not in (None, config["vocab_size"]) or "d2t" in tensors:
        raise ModelError(f"{folder / CONFIG}: a draft vocabulary, and a block head has the policy's; train another")
    if not within.get("target_layer_ids") or not isinstance(config.get("block_size"), int):
        raise ModelError(f"{folder / CONFIG}: lacks dflash_config.target_layer_ids or block_size; add what it has")
    if "mask_embedding" not in tensors and (folder / MASK_FILE).is_file():
        raise ModelError(f"{folder / MASK_FILE}: a pickle, and none is ever loaded; add its tensor to the safetensors")


def _layers(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LlamaConfig:
    known = (LlamaConfig().to_dict().keys() | {"rope_theta", "rope_scaling"}) - {"dtype", "architectures", "model_type"}
    made: LlamaConfig = LlamaConfig.from_dict({key: value for key, value in config.items() if key in known})
    made.draft_vocab_size = config.get("draft_vocab_size") or len(tensors.get("lm_head.weight", ())) or made.vocab_size
    made.architectures = ["LlamaForCausalLMEagle3"]
    return made


def _taps(config: Mapping[str, Any], folder: Path) -> tuple[int, ...] | None:
    """The taps by the only key that means the same to everyone who reads it; None where no key names any."""
    outputs = (config.get("dflash_config") or {}).get("target_layer_ids")
    if outputs:
        return tuple(int(layer) for layer in outputs)
    named = config.get(IDS)
    if named:
        taps = tuple(int(layer) - TAP_OFFSETS["vllm"] for layer in named)
        if min(taps) < 0:
            raise ModelError(
                f"{folder / CONFIG}: {IDS}={named} has the embeddings, which no tap reads; train another head"
            )
        return taps
    ambiguous = (config.get("eagle_config") or {}).get(IDS)
    if ambiguous:
        outputs, inputs = [int(i) for i in ambiguous], [int(i) - 1 for i in ambiguous]
        raise ModelError(
            f"{folder / CONFIG}: eagle_config names layers {ambiguous}, of which SGLang takes the outputs and vLLM the "
            f"inputs; say which it was trained on: drafter.head.taps={outputs} or {inputs}"
        )
    return None


def _without_identity(tensors: dict[str, Tensor], vocabulary: int) -> dict[str, Tensor]:
    """The tensors less a mapping of the vocabulary onto itself."""
    d2t = tensors.get("d2t")
    if d2t is None or (len(d2t) == vocabulary and not d2t.any()):
        return {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    return tensors
