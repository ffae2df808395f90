"""What the engine asks of vLLM's workers, as methods that vLLM adds to each of them."""

import os
from typing import Any, Literal

import torch

from paceline.engines.vllm import workarounds
from paceline.forward.checksum import checksums
from paceline.schema import PacelineError

#: What may be asked of the plug-in in the worker.
PLUGIN_METHODS = (
    "report",
    "set_drafting",
    "aside",
    "on_weights",
    "absorb",
    "snapshot",
    "restore",
    "state",
    "load_state",
    "probe",
    "close",
)
#: The name under which vLLM knows the transfer engine.
TRANSFER = "paceline"
#: A packed matrix that answers this differently from its weight, relative to the largest answer, is stale.
_STALE = 0.02

Part = Literal["policy", "drafter"]


class WorkerExtension:
    """Goes to vLLM as ``worker_extension_cls``; every method is called by name through ``collective_rpc``."""

    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any

    def paceline_mend(self, mend: bool) -> list[str]:
        """Mend known faults, or take earlier mends back; returns the names of those that are mended now."""
        return workarounds.mend_worker(self.model_runner, mend, transfers=True)

    @torch.inference_mode()
    def paceline_checksums(self, part: Part) -> dict[str, int]:
        """64 bits for each tensor of the policy's or the drafter's model, by name; none where there is no model.

        A matrix that vLLM keeps in packed form only is represented by its answer to a fixed input. What a drafter
        shares with the policy counts as the policy's.
        """
        model = _model(self, part)
        if model is None:
            return {}
        own = _tensors(model)
        if part == "drafter":
            shared = _places(_model(self, "policy"))
            own = {name: tensor for name, tensor in own.items() if tensor.data_ptr() not in shared}
        shared_modules = set() if part == "policy" else set(_model(self, "policy").modules())
        return checksums({**own, **_answers(model, shared_modules)})

    @torch.inference_mode()
    def paceline_stale(self, part: Part) -> list[str]:
        """The layers whose packed matrix is not the one of their weight."""
        model = _model(self, part)
        return [] if model is None else [name for name, layer in model.named_modules() if _is_stale(layer)]

    def paceline_layout(self) -> dict[str, Any]:
        """How the policy's weights are laid out: ``fused`` layers by their parts, whether ``tied``, ``parameters``.

        ``shared`` are those that the drafter's model has from the policy, by the names that it gives them.
        """
        model = _model(self, "policy")
        config = self.vllm_config.model_config.hf_config.get_text_config()
        tied = bool(getattr(config, "tie_word_embeddings", False))
        fused = {name: list(parts) for name, parts in getattr(model, "packed_modules_mapping", {}).items()}
        drafter = _model(self, "drafter")
        own = {} if drafter is None else _tensors(drafter)
        shared = [name for name, tensor in own.items() if tensor.data_ptr() in _places(model)]
        names = [name for name, _ in model.named_parameters()]
        return {"fused": fused, "tied": tied, "parameters": names, "shared": shared}

    def paceline_has_draft_model(self) -> bool:
        """Whether a model drafts, with weights of its own."""
        return _model(self, "drafter") is not None

    def paceline_reload(self, part: Part) -> bool:
        """Load the weights that the model was started with again; false where no model has that part."""
        from vllm.config import set_current_vllm_config

        from paceline.engines.vllm import transfer

        model = _model(self, part)
        if model is None:
            return False
        with set_current_vllm_config(self.vllm_config):
            transfer.reload_checkpoint(model, _model_config(self, part), self.vllm_config.load_config)
        return True

    def paceline_loaded(self) -> dict[str, Any]:
        """The last weight update: its ``version``, ``part`` and the ``names`` that were loaded, as vLLM has them."""
        return dict(self.weight_transfer_engine.last)

    def paceline_drafting(self, on: bool) -> bool:
        """Whether a drafter of vLLM's own could be told to draft or not: what it proposes is thrown away then.

        It goes on proposing, so that its own cache stays whole.
        """
        runner = self.model_runner
        if self.vllm_config.scheduler_config.async_scheduling:
            return on  # drafts never leave the worker
        runner.__dict__.pop("take_draft_token_ids", None)
        if not on:
            runner.take_draft_token_ids = lambda: None
        return True

    def paceline_execution(self) -> dict[str, Any]:
        """What passes run with: device, attention backends, CUDA graphs and their sizes, scheduling, prefix caching."""
        from vllm.platforms import current_platform

        config = self.vllm_config
        graphs = config.compilation_config
        groups = getattr(self.model_runner, "attn_groups", ())
        mode = getattr(graphs.cudagraph_mode, "name", None)
        device, name = str(config.device_config.device), current_platform.get_device_name()
        return {
            "device": device if name == device else f"{device} ({name})",
            "attention": ", ".join(sorted({group.backend.get_name() for cache in groups for group in cache})),
            "graphs": "NONE" if config.model_config.enforce_eager else str(mode),
            "captured": sorted(graphs.cudagraph_capture_sizes or ()),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        }

    def paceline_process(self) -> int:
        """The id of the process that the worker runs in."""
        return os.getpid()

    def paceline_plugin(self, method: str, *args: Any) -> Any:
        """Call a method of the drafter plug-in; None where another drafter serves."""
        if method not in PLUGIN_METHODS:
            raise PacelineError(f"the plug-in has no method {method!r}; it has {', '.join(PLUGIN_METHODS)}")
        plugin = getattr(self.model_runner, "drafter", None)
        call = getattr(plugin, method, None)
        return None if call is None else call(*args)


def _model(worker: Any, part: Part) -> Any:
    return worker.model_runner.get_model() if part == "policy" else worker.get_draft_model()


def _model_config(worker: Any, part: Part) -> Any:
    config = worker.vllm_config
    return config.model_config if part == "policy" else config.speculative_config.draft_model_config


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in named.items() if tensor.numel()}


def _places(model: Any) -> set[int]:
    return {tensor.data_ptr() for tensor in _tensors(model).values()}


def _answers(model: Any, shared: set[Any]) -> dict[str, torch.Tensor]:
    """What packed layers answer to a fixed input, by name."""
    layers = {name: layer for name, layer in model.named_modules() if _is_packed(layer) and layer not in shared}
    return {f"{name}.packed": layer.cpu_linear(_probe(layer), layer.weight, None) for name, layer in layers.items()}


def _is_packed(layer: Any) -> bool:
    """Whether the layer multiplies by a copy of its weight that vLLM made for the CPU."""
    return getattr(layer, "cpu_linear", None) is not None and _width(layer) > 0


def _width(layer: Any) -> int:
    # Where only the packed matrix was kept the weight is an empty vector.
    if layer.weight.ndim == 2:
        return int(layer.weight.shape[1])
    return int(getattr(layer, "input_size_per_partition", getattr(layer, "input_size", 0)))


def _probe(layer: Any) -> torch.Tensor:
    return torch.randn(1, _width(layer), generator=torch.Generator().manual_seed(0)).to(layer.weight.dtype)


def _is_stale(layer: Any) -> bool:
    if not _is_packed(layer) or layer.weight.ndim != 2:
        return False
    packed = layer.cpu_linear(_probe(layer), layer.weight, None)
    direct = torch.nn.functional.linear(_probe(layer), layer.weight)
    return bool((packed - direct).abs().max() > _STALE * direct.abs().max())


def _register_transfer() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER, "paceline.engines.vllm.transfer", "TransferEngine")


# vLLM imports this module in each worker, when it looks up the class above; a moment later it looks up the transfer
# engine by name, and offers nothing in between.
_register_transfer()
workarounds.keep_heads_apart()
