"""The sizes of a policy, from the configuration that its checkpoint carries, and its parameters counted from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.schema import PacelineError
from paceline.sizes.presets import PRESETS
from paceline.typed_yaml import nearest

#: Families whose parameters are counted; those with a mixture of experts name its sizes.
_FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
_QK_NORM = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_SHARED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
_NORMALISED = ("mixtral", "qwen3_next", "qwen3_5_moe_text")
_LINEAR = "linear_attention"


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture: ``count`` experts, a token takes ``active``, each ``ffn`` wide; ``shared`` is one that all take.

    ``normalised``: the weights of those that a token takes sum to 1.
    """

    count: int
    active: int
    ffn: int
    shared: int = 0
    normalised: bool = False


class LinearAttention(msgspec.Struct, frozen=True, kw_only=True):
    """A gated delta net (arXiv 2412.06464): the widths of its keys and values, and its convolution's kernel."""

    key: int
    value: int
    value_heads: int
    value_dim: int
    kernel: int


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A policy's sizes. ``sparse`` and ``linear`` say of each layer whether its MLP is a mixture, its attention linear.

    ``gated``: queries come with a gate of their own width. ``biased`` counts the matrices q, k, v, o that have a bias.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    tied: bool
    biased: int
    mlp_biased: bool
    qk_norm: bool
    gated: bool
    sparse: tuple[bool, ...]
    linear: tuple[bool, ...]
    experts: Experts | None = None
    linear_attention: LinearAttention | None = None
    #: What a drafter's layers take for their MLP.
    drafter_ffn: int = 0

    @property
    def q(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    def attention_parameters(self, layer: int) -> int:
        """Those of a layer's attention."""
        if self.linear[layer]:
            own = self.linear_attention
            assert own is not None
            mixed = 2 * own.key + own.value
            inward = self.hidden * (mixed + own.value + 2 * own.value_heads)
            return inward + mixed * own.kernel + 2 * own.value_heads + own.value_dim + own.value * self.hidden
        q = self.q * (2 if self.gated else 1)
        weights = self.hidden * (q + 2 * self.kv) + self.q * self.hidden
        biases = (q + 2 * self.kv if self.biased else 0) + (self.hidden if self.biased == 4 else 0)
        return weights + biases + (2 * self.head_dim if self.qk_norm else 0)

    def expert_parameters(self, layer: int) -> int:
        """Those that expert parallelism divides: of a layer's experts, without the shared one and the router."""
        if not self.sparse[layer]:
            return 0
        assert self.experts is not None
        return self.experts.count * 3 * self.hidden * self.experts.ffn

    def dense_parameters(self, layer: int) -> int:
        """All others of a layer, its two norms among them."""
        mlp = 3 * self.hidden * self.ffn + (2 * self.ffn + self.hidden if self.mlp_biased else 0)
        if self.sparse[layer]:
            assert self.experts is not None
            shared = 3 * self.hidden * self.experts.shared + self.hidden if self.experts.shared else 0
            mlp = self.experts.count * self.hidden + shared
        return self.attention_parameters(layer) + mlp + 2 * self.hidden

    @property
    def matrix(self) -> int:
        """Parameters of the embeddings, and of the output matrix."""
        return self.vocabulary * self.hidden

    def parameters(self) -> int:
        """All of them; tied embeddings count once."""
        layers = sum(self.dense_parameters(i) + self.expert_parameters(i) for i in range(self.layers))
        return layers + self.hidden + self.matrix * (1 if self.tied else 2)

    def active_parameters(self) -> int:
        """Those that one token is multiplied with, embeddings among them."""
        idle = 0
        if self.experts is not None:
            share = self.experts.count - self.experts.active
            idle = sum(self.sparse) * share * 3 * self.hidden * self.experts.ffn
        return self.parameters() - idle


class _HfConfig(msgspec.Struct, kw_only=True):
    """What is read of a ``config.json``."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool | None = None
    qkv_bias: bool = True
    mlp_bias: bool = False
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool | None = None
    shared_expert_intermediate_size: int = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    layer_types: list[str] | None = None
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32


def load_shape(name: str) -> Shape:
    """A preset by its name, or the ``config.json`` at a path, or in a folder. PacelineError in one line for others."""
    if name.lower() in PRESETS:
        return shape_of(PRESETS[name.lower()], name.lower())
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise PacelineError(
            f"--model {name}: no such config.json, and no preset{nearest(name.lower(), PRESETS)}; "
            f"presets: {', '.join(PRESETS)}"
        )
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PacelineError(f"--model {path}: not a config.json: {error}") from None
    return shape_of(content, str(path))


def shape_of(config: Mapping[str, Any], name: str) -> Shape:
    """The sizes that a Hugging Face configuration gives; of a multimodal one those of its text model.

    Raises PacelineError in one line for a family that is not counted here and for values that are none.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {"tie_word_embeddings": config.get("tie_word_embeddings", False), **inner}
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise PacelineError(f"{name}: model_type {family!r} is not planned for; these are: {', '.join(_FAMILIES)}")
    try:
        read = msgspec.convert({key: value for key, value in config.items() if value is not None}, _HfConfig)
    except msgspec.ValidationError as error:
        raise PacelineError(f"{name}: not the configuration of a {family}: {error}") from None
    wrong = [key for key, value in msgspec.structs.asdict(read).items() if type(value) is int and value < 0]
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "num_key_value_heads")
    wrong += [key for key in (*sizes, "head_dim", "decoder_sparse_step") if getattr(read, key) == 0]
    if wrong:
        raise PacelineError(f"{name}: {wrong[0]}={getattr(read, wrong[0])}: a size is 1 or more")
    return _shape(read, name)


def _shape(read: _HfConfig, name: str) -> Shape:
    family, layers = read.model_type, read.num_hidden_layers
    hybrid = family in _HYBRID
    kinds = read.layer_types or [
        _LINEAR if hybrid and (i + 1) % max(read.full_attention_interval, 1) else "full_attention"
        for i in range(layers)
    ]
    if len(kinds) != layers:
        raise PacelineError(f"{name}: layer_types names {len(kinds)} layers of {layers}")
    experts = _experts(read, name)
    only = frozenset(read.mlp_only_layers or ())
    sparse = tuple(
        experts is not None and i not in only and (i + 1) % read.decoder_sparse_step == 0 for i in range(layers)
    )
    ffn = read.intermediate_size or 0
    if not all(sparse) and ffn == 0:
        raise PacelineError(f"{name}: has layers without experts, and no intermediate_size")
    if read.attention_bias is None:
        biased = 3 if family == "qwen2" or (family == "qwen2_moe" and read.qkv_bias) else 0
    else:
        biased = 4 if read.attention_bias else 0
    return Shape(
        name=name,
        hidden=read.hidden_size,
        layers=layers,
        heads=read.num_attention_heads,
        kv_heads=read.num_key_value_heads or read.num_attention_heads,
        head_dim=read.head_dim or read.hidden_size // read.num_attention_heads,
        ffn=ffn,
        vocabulary=read.vocab_size,
        tied=read.tie_word_embeddings,
        biased=biased,
        mlp_biased=read.mlp_bias,
        qk_norm=family in _QK_NORM,
        gated=hybrid,
        sparse=sparse,
        linear=tuple(kind == _LINEAR for kind in kinds),
        experts=experts,
        linear_attention=LinearAttention(
            key=read.linear_num_key_heads * read.linear_key_head_dim,
            value=read.linear_num_value_heads * read.linear_value_head_dim,
            value_heads=read.linear_num_value_heads,
            value_dim=read.linear_value_head_dim,
            kernel=read.linear_conv_kernel_dim,
        )
        if hybrid
        else None,
        drafter_ffn=ffn or 4 * read.hidden_size,
    )


def _experts(read: _HfConfig, name: str) -> Experts | None:
    count = read.num_experts or read.num_local_experts
    if not count or read.model_type in ("llama", "mistral", "qwen2", "qwen3", "qwen3_5_text"):
        return None
    ffn = read.intermediate_size if read.model_type == "mixtral" else read.moe_intermediate_size
    active = read.num_experts_per_tok
    if not ffn or not active or active > count:
        raise PacelineError(f"{name}: {count} experts, but {active} of them active and {ffn} wide")
    shared = read.shared_expert_intermediate_size if read.model_type in _SHARED else 0
    normalised = read.norm_topk_prob
    if normalised is None or read.model_type == "qwen3_5_moe_text":
        normalised = read.model_type in _NORMALISED
    return Experts(count=count, active=active, ffn=ffn, shared=shared, normalised=normalised)
