"""Low-rank adapters on the last layers of a policy: made by peft, kept as safetensors, merged for the engine.

An adapted weight is W + (alpha / r) B A (Hu et al. 2021). Nothing here loads a pickle.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.config import LoraConfig, PolicyConfig
from paceline.files import files_replaced, named, read_json_object, to_json
from paceline.forward.layers import decoder_layers
from paceline.forward.model_files import about, check_finite, foreign, read_tensors
from paceline.forward.sharding import gathered, placed
from paceline.rl.models import ModelError
from paceline.terminal import printable

_ADAPTER = "default"
_PEFT_PREFIX = "base_model.model."
_WEIGHTS, _CONFIG, _PICKLE = "adapter_model.safetensors", "adapter_config.json", "adapter_model.bin"
_MAX_CONFIG_BYTES = 16 << 20
# Settings of an adapter that change what its tensors mean, and that are not supported here.
_PLAIN = {
    "use_dora": False,
    "use_rslora": False,
    "lora_bias": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
}


def add_lora(model: PreTrainedModel, config: LoraConfig, seed: int) -> PeftModel:
    """Wrap ``model`` (changed in place) with a fresh adapter: A random under ``seed``, B zero, all else frozen.

    Raises ModelError where ``targets`` name no linear module or ``layers`` exceeds the model's.
    """
    name, layers = decoder_layers(model)
    if config.layers > len(layers):
        raise ModelError(f"policy.lora.layers={config.layers}: the model has {len(layers)} layers")
    first = len(layers) - config.layers if config.layers else 0
    inside = {leaf.rpartition(".")[2] for leaf, module in layers[-1].named_modules() if not list(module.children())}
    missing = sorted(set(config.targets) - inside)
    if missing:
        known = ", ".join(sorted(inside))
        raise ModelError(f"policy.lora.targets: no module {missing[0]!r} in the decoder layers; there are: {known}")
    settings = PeftLoraConfig(
        r=config.r,
        # peft types alpha as an int and takes any number.
        lora_alpha=int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,  # type: ignore[arg-type]
        target_modules=sorted(config.targets),
        layers_to_transform=list(range(first, len(layers))) if config.layers else None,
        layers_pattern=name.rpartition(".")[2] if config.layers else None,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Nothing a user could act on: a property asked for by its old name, and a Conv1D noticed and handled.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
        torch.manual_seed(seed)
        return get_peft_model(model, settings)


def adapted(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Plain name and module of every adapted linear, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name.removeprefix(_PEFT_PREFIX), module


def plain_name(name: str) -> str:
    """``base_model.model.model.layers.0.q.lora_A.default.weight`` -> ``model.layers.0.q.lora_A.weight``."""
    return name.removeprefix(_PEFT_PREFIX).replace(f".{_ADAPTER}.weight", ".weight")


@torch.no_grad()
def merged_weight(layer: LoraLinear) -> Tensor:
    """A new tensor W + scale B A in W's dtype; product and sum in float32 at least."""
    base = gathered(layer.get_parameter("base_layer.weight"))
    wide = torch.promote_types(base.dtype, torch.float32)
    a, b = (gathered(layer.get_parameter(f"lora_{side}.{_ADAPTER}.weight")).to(wide) for side in "AB")
    delta = (b @ a) * layer.scaling[_ADAPTER]
    # A Conv1D (GPT-2) keeps its weight as (in, out).
    return (base.to(wide) + (delta.T if layer.fan_in_fan_out else delta)).to(base.dtype)


def unfold(config: PolicyConfig) -> PolicyConfig:
    """``config`` itself, or where its path is an adapter's directory: the base model's path, and the adapter.

    Raises ModelError where a second adapter is configured, or the adapter does not say what it was made for.
    """
    with foreign(f"policy.path={named(config.path)}"):
        settings_file = Path(config.path).expanduser() / _CONFIG
        if not settings_file.is_file():
            return config
    if config.adapter is not None:
        raise ModelError(f"policy.path={config.path} is an adapter itself; leave policy.adapter out, or name its model")
    with about(f"policy.path={named(config.path)}"):
        base = read_json_object(settings_file, _MAX_CONFIG_BYTES).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"policy.path={config.path}: the adapter names no base model; set policy.path to that model and "
            "policy.adapter to the adapter"
        )
    return replace(config, path=base, adapter=config.path)


def read_adapter(directory: Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Shape and tensors (by plain name) of a peft adapter directory.

    ``layers`` of the result counts the adapted layers (0: all). Raises ModelError for anything missing, unreadable, or
    of a kind of adapter that is not plain LoRA.
    """
    where = f"policy.adapter={named(directory)}"
    with about(where):
        return _read_adapter(directory, where)


def _read_adapter(directory: Path, where: str) -> tuple[LoraConfig, dict[str, Tensor]]:
    with foreign(where):
        if not directory.is_dir():
            raise ModelError(f"{where}: no such directory; `paceline warmup` makes one")
    settings = read_json_object(directory / _CONFIG, _MAX_CONFIG_BYTES)
    if not (directory / _WEIGHTS).exists() and (directory / _PICKLE).exists():
        raise ModelError(f"{where}: {_PICKLE} is a pickle, which is never loaded; save the adapter as safetensors")
    tensors = read_tensors(directory / _WEIGHTS)
    shape = _shape(settings, f"{where}: {_CONFIG}")
    check_finite(tensors, f"{where}: {_WEIGHTS}")
    for name, tensor in tensors.items():
        # The adapter is made by the settings before its tensors are looked at.
        if ".lora_A." in name and tensor.ndim == 2 and len(tensor) != shape.r:
            raise ModelError(f"{where}: {printable(name)} has rank {len(tensor)}, and r={shape.r} in {_CONFIG}")
    if shape.r > max((max(tensor.shape, default=0) for tensor in tensors.values()), default=0):
        raise ModelError(f"{where}: r={shape.r} in {_CONFIG}, and no tensor in {_WEIGHTS} is as large")
    return shape, {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in tensors.items()}


def _shape(settings: Mapping[str, Any], where: str) -> LoraConfig:
    """The shape that a configuration of peft's says; ModelError, beginning with ``where``, by the key that is wrong."""

    def check(key: str, is_good: bool, wanted: str) -> None:
        if not is_good:
            raise ModelError(f"{where}: {key}={printable(settings.get(key), 80)}: must be {wanted}")

    for key, plain in _PLAIN.items():
        if settings.get(key) not in (plain, None):
            raise ModelError(f"{where}: {key}={printable(settings[key], 80)} is not plain LoRA")
    kind, targets, alpha = settings.get("peft_type", "LORA"), settings.get("target_modules"), settings.get("lora_alpha")
    layers, rank = settings.get("layers_to_transform"), settings.get("r")
    check("peft_type", kind in ("LORA", None), "LORA")
    check("r", type(rank) is int and 0 < rank < 1 << 31, "a whole number above 0")
    check("lora_alpha", type(alpha) in (int, float) and 0 < alpha < math.inf, "a number above 0")  # type: ignore[operator]
    is_names = isinstance(targets, list) and targets and all(isinstance(name, str) for name in targets)
    check("target_modules", bool(is_names), "a list of module names")
    numbers = [layers] if type(layers) is int else [] if layers is None else layers
    is_layers = isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)
    check("layers_to_transform", is_layers, "a list of layers' numbers")
    assert isinstance(rank, int)
    assert isinstance(numbers, list)
    return LoraConfig(
        r=rank, alpha=float(alpha or 0), layers=len(set(numbers)), targets=tuple(sorted(set(targets or ())))
    )


def warm_start(model: nn.Module, config: LoraConfig, directory: Path) -> None:
    """Copy the adapter of ``directory`` into the fresh one; ModelError names the first thing that differs."""
    shape, tensors = read_adapter(directory)
    for key in ("r", "alpha", "layers"):
        if getattr(shape, key) != getattr(config, key):
            raise ModelError(
                f"policy.adapter={directory}: made with {key}={getattr(shape, key)}, "
                f"but policy.lora.{key}={getattr(config, key)}; set policy.lora.{key}={getattr(shape, key)}"
            )
    wanted = {plain_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    copy_exactly(wanted, tensors, f"policy.adapter={directory}")


@torch.no_grad()
def copy_exactly(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], where: str) -> None:
    """Copy ``given`` into ``wanted`` in place; ModelError names the first tensor missing, unknown or of another shape.

    Nothing is copied unless everything fits.
    """
    for name, tensor in wanted.items():
        if name not in given:
            raise ModelError(f"{where}: tensor {name} is missing")
        if given[name].shape != tensor.shape:
            raise ModelError(f"{where}: {name} has shape {tuple(given[name].shape)}, wanted {tuple(tensor.shape)}")
    if unknown := sorted(set(given) - set(wanted)):
        raise ModelError(f"{where}: tensor {unknown[0]} has no place in this policy")
    for name, tensor in wanted.items():
        tensor.copy_(placed(given[name], tensor))


def write_adapter(model: PeftModel, directory: Path, base: str | None, dtype: torch.dtype | None = None) -> None:
    """Write the adapter as a peft directory, each file at once; other files there stay.

    ``base`` is the name of the model that it belongs to (None: not recorded); the tensors are written in ``dtype``
    (None: as they are).
    """
    settings = model.peft_config[_ADAPTER].to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    tensors = {
        _PEFT_PREFIX + plain_name(name): parameter.detach().to("cpu", dtype).contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    with files_replaced(directory) as fresh:
        (fresh / _WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
        text = to_json(settings, indent=2, sort_keys=True, default=_as_json)
        (fresh / _CONFIG).write_text(text + "\n", encoding="utf-8")


def _as_json(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)
