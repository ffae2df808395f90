"""The policy that trains: a causal language model, its tokenizer, its adapter, and what an engine gets of it."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.config import Config, PolicyConfig
from paceline.cotrain.taps import Collector
from paceline.drafters import PolicyTraits
from paceline.files import files_replaced, named
from paceline.forward.layers import checkpoint_layers
from paceline.forward.model_files import foreign, load_tokenizer, no_progress_bars
from paceline.forward.pretrained import load_pretrained
from paceline.forward.sharding import exchange, is_sharded, on_first_rank, saved
from paceline.rl import lora
from paceline.rl.models import SMOLLM2, ModelError, resolve_model
from paceline.rl.prompts import Fit
from paceline.rl.scoring import Scorer
from paceline.schema import Tokens, as_tokens
from paceline.terminal import printable


class Policy:
    """A model in train-ready state: eval mode, so without dropout, with gradients on what trains and nothing else.

    ``model`` is the Hugging Face model; with LoRA its adapted linears are peft's, inside the same model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: PolicyConfig,
        adapter: PeftModel | None = None,
    ) -> None:
        self.model = model.eval()
        if config.gradient_checkpointing:
            checkpoint_layers(model, f"policy.path={config.path}")
        self.tokenizer = tokenizer
        self.config = config
        self.adapter = adapter
        self.scorer = Scorer(model)
        #: Whether the weights are still those of the start: the reference of a KL penalty must be taken from such.
        self.pristine = True

    @classmethod
    def load(cls, config: PolicyConfig, seed: int) -> "Policy":
        """The policy of ``config``; a fresh LoRA is a function of ``seed``. Raises ModelError or DataError, one line.

        A ``path`` that is an adapter's directory stands for the adapter's base model and the adapter.
        With ``adapter`` and ``lora``, training goes on from the adapter, which must have the shape that ``lora`` says;
        with ``adapter`` alone it is merged into the weights, and all of them train.
        """
        config = lora.unfold(config)
        source = resolve_model(config.path)
        device = device_of(config.device)
        model, tokenizer = _pretrained(source, config)
        adapter = None
        if config.lora is not None:
            adapter = lora.add_lora(model, config.lora, seed)
            if config.adapter is not None:
                lora.warm_start(adapter, config.lora, Path(config.adapter).expanduser())
        elif config.adapter is not None:
            directory = Path(config.adapter).expanduser()
            shape, _ = lora.read_adapter(directory)
            wrapped = lora.add_lora(model, shape, seed)
            lora.warm_start(wrapped, shape, directory)
            model = _merged_copy(wrapped)
            model.requires_grad_(True)
        model.to(device)  # type: ignore[arg-type]
        return cls(model, tokenizer, config, adapter)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.get_input_embeddings().weight.device

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Name and parameter of everything that trains, tied weights once, in the model's order."""
        return [(lora.plain_name(name), p) for name, p in self.model.named_parameters() if p.requires_grad]

    def refit_names(self) -> list[str]:
        """The plain model's names of the weights that training changes."""
        if self.adapter is None:
            return [name for name, _ in self.trainable()]
        return [f"{name}.weight" for name, _ in lora.adapted(self.adapter)]

    def refit_tensors(self) -> dict[str, Tensor]:
        """Those weights by plain name, adapters merged, in the model's dtype; the model is left as it is.

        With LoRA the tensors are new. Without, they are the live weights: copy them before the next update. Those of a
        sharded policy are gathered one by one: rank 0 gets copies on the CPU, the others empty tensors.
        """
        if self.adapter is None:
            live = ((name, parameter.detach()) for name, parameter in self.trainable())
            return {name: saved(weight) if is_sharded(weight) else weight for name, weight in live}
        return {
            f"{name}.weight": on_first_rank(lora.merged_weight(layer), layer.get_parameter("base_layer.weight"))
            for name, layer in lora.adapted(self.adapter)
        }

    def engine_model(self) -> PreTrainedModel:
        """An independent plain copy with merged weights, in eval mode and without gradients, for an engine to own."""
        if self.adapter is not None:
            return _merged_copy(self.adapter)
        return _own_forward(copy.deepcopy(self.model)).requires_grad_(False).eval()

    def encode_prompt(self, text: str) -> Tokens:
        """Token ids of a prompt: one user turn of the chat template, ready for the answer, or the bare text.

        The template is used where the tokenizer has one and ``policy.chat`` is not false. Raises ModelError where
        ``policy.chat`` is true without a template, and for text without a single token.
        """
        return encode_prompt(self.tokenizer, self.config, text)

    def fit(self, config: Config) -> Fit:
        """Which prompts of a run of ``config`` this policy's engine can decode."""
        traits = self.traits(config)
        return fit_of(config, traits.context, traits.vocabulary_size)

    def decode(self, tokens: Tokens) -> str:
        """Text of ``tokens``, special tokens left out."""
        ids = np.asarray(tokens).tolist()
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends a response, by the generation configuration and the tokenizer, ascending."""
        generation = self.model.generation_config
        ids = {self.tokenizer.eos_token_id}
        for stated in (
            generation.eos_token_id if generation else None,
            getattr(self.model.config, "eos_token_id", None),
        ):
            ids |= set(stated) if isinstance(stated, (list, tuple)) else {stated}
        return tuple(sorted(int(i) for i in ids if i is not None and i >= 0))

    def traits(self, config: Config) -> PolicyTraits:
        """What a model that drafts for this policy in a run of ``config`` must know."""
        text = self.model.config.get_text_config()
        limits = (config.engine.context, getattr(text, "max_position_embeddings", 0))
        return PolicyTraits(
            vocabulary_size=int(text.vocab_size),
            run_seed=config.seed,
            eos_ids=self.eos_ids,
            acceptance=config.engine.acceptance,
            device=str(self.device),
            tokenizer=self.tokenizer,
            context=min((limit for limit in limits if limit), default=0),
        )

    def state(self) -> dict[str, Tensor]:
        """Copies of what trains, by name, on the CPU; of a sharded policy rank 0 has them, and others empty ones."""
        return {name: saved(parameter) for name, parameter in self.trainable()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave; where a tensor does not fit, ModelError names it and nothing changes."""
        lora.copy_exactly(dict(self.trainable()), tensors, "checkpoint")
        self.pristine = False

    @contextmanager
    def weights_of(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within it the trainable weights are ``tensors`` (by name, on the model's device). No graph may be live."""
        pairs = [(parameter, tensors[name]) for name, parameter in self.trainable()]
        if any(is_sharded(parameter) for parameter, _ in pairs):
            # What is gathered is the storage of the parameter, whatever its ``data`` says.
            for pair in pairs:
                exchange(*pair)
            try:
                yield
            finally:
                for pair in pairs:
                    exchange(*pair)
            return
        own = {name: parameter.data for name, parameter in self.trainable()}
        try:
            for name, parameter in self.trainable():
                parameter.data = tensors[name]
            yield
        finally:
            for name, parameter in self.trainable():
                parameter.data = own[name]

    def save_adapter(self, directory: Path, dtype: torch.dtype | None = None) -> None:
        """Write the LoRA as a peft adapter directory. ModelError where all weights train."""
        if self.adapter is None:
            raise ModelError("there is no adapter to save, as all weights train; save the model")
        local = Path(self.config.path).expanduser().exists() and self.config.path != SMOLLM2
        lora.write_adapter(self.adapter, directory, None if local else self.config.path, dtype)

    def save_pretrained(self, directory: Path) -> None:
        """Write the merged model and its tokenizer as an ordinary transformers directory.

        FileWriteError where it cannot be written; what was there before is still whole then.
        """
        with files_replaced(directory) as fresh:
            with no_progress_bars():
                self.engine_model().save_pretrained(fresh)
            self.tokenizer.save_pretrained(fresh)

    def logprobs(
        self,
        prompts: Sequence[Tokens],
        responses: Sequence[Tokens],
        temperature: float,
        collector: Collector | None = None,
        wanted: Collection[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``Scorer.logprobs``: log-probability (with gradients) and entropy of every response token, each (N,)."""
        return self.scorer.logprobs(prompts, responses, temperature, collector, wanted)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, config: PolicyConfig, text: str) -> Tokens:
    """``Policy.encode_prompt`` without the model."""
    has_template = tokenizer.chat_template is not None
    if config.chat and not has_template:
        raise ModelError("policy.chat=true: this tokenizer has no chat template; set policy.chat=false")
    quoted = f"prompt {printable(repr(text), 80)}"
    if has_template and config.chat is not False:
        turn = [{"role": "user", "content": text}]
        with foreign(f"{quoted}: the chat template of policy.path={named(config.path)} fails"):
            ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    else:
        with foreign(f"{quoted}: the tokenizer of policy.path={named(config.path)} fails"):
            ids = tokenizer(text)["input_ids"]
    if not ids:
        raise ModelError(f"{quoted}: the tokenizer makes no token of it")
    return as_tokens(ids)


def fit_of(config: Config, context: int, vocabulary: int) -> Fit:
    """Which prompts of a run of ``config`` fit: ``context`` positions (0: not known), ids below ``vocabulary``."""
    return Fit(context, vocabulary, config.engine.kv_tokens, config.sampling.max_tokens, config.rl.overlong_prompts)


def device_of(name: str) -> torch.device:
    """What ``policy.device`` means here. ModelError where it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"policy.device={name}: not usable here ({reason}); set policy.device=auto") from None


def _pretrained(source: Path | str, config: PolicyConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (on the CPU, so that a LoRA's random start is the same on every device) and tokenizer."""
    key, trust = "policy.path", config.trust_remote_code
    tokenizer = load_tokenizer(source, f"{key}={named(config.path)}", trust)
    return load_pretrained(source, key, config.path, config.dtype, trust), tokenizer


def _merged_copy(adapter: PeftModel) -> PreTrainedModel:
    """A plain copy of the wrapped model with its adapter merged, without gradients."""
    merged = {f"{name}.weight": lora.merged_weight(layer) for name, layer in lora.adapted(adapter)}
    plain = copy.deepcopy(adapter).unload()
    assert isinstance(plain, PreTrainedModel)
    lora.copy_exactly({name: plain.get_parameter(name) for name in merged}, merged, "merge")
    return _own_forward(plain).eval().requires_grad_(False)


def _own_forward(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its classes' forwards: one that a trainer put in their place may run the model it was put on."""
    for module in model.modules():
        module.__dict__.pop("forward", None)
    return model
