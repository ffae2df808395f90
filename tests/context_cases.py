"""Models that draft, and what the ranks of a context-parallel group make of documents, in threads and in processes."""

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import MistralConfig, MistralForCausalLM

from paceline.config import CotrainConfig
from paceline.cotrain.losses import Teacher
from paceline.cotrain.objectives import make_objective
from paceline.cotrain.parallel.documents import ShardDocument
from paceline.cotrain.parallel.objectives import make_context_objective
from paceline.cotrain.parallel.peers import TransportPeers
from paceline.cotrain.parallel.transport import GroupTransport
from paceline.cotrain.trainer import Trainer
from paceline.drafters.heads import Head
from taught import KEYS, documents_of, trained
from tiny_models import VOCABULARY, tiny

#: Responses of one token, documents of one row, and fewer rows than ranks.
SHAPES = ((12, 4), (9, 1), (4, 2), (7, 6), (40, 11), (2, 1), (3, 1), (15, 14))
HEADS = {
    "eagle3": {"vocabulary": 17},
    "mtp": {},
    "block": {"taps": (0, 1), "layers": 2, "block": 4},
}
KINDS = ("eagle3", "block", "language model", "window")


def policy_of():
    return tiny("llama").requires_grad_(False)


def model_of(kind, policy):
    """A head far from its start, or a language model, of which one looks back over 5 positions alone."""
    if kind in HEADS:
        return trained(policy, kind, **HEADS[kind])[0]
    if kind == "language model":
        return tiny("qwen3", seed=1)
    torch.manual_seed(2)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5}
    config = MistralConfig(vocab_size=VOCABULARY, initializer_range=0.3, **shape, **heads)
    return MistralForCausalLM(config).double().eval()


def texts_of(model, policy, shapes=SHAPES, seed=0):
    return documents_of(policy, model.taps if isinstance(model, Head) else (), shapes, seed)


def shards_of(documents, transport, held=None):
    """A rank's documents, of which its group holds those at the places ``held`` (None: all)."""
    return [
        ShardDocument.of(document, transport.world, transport.rank)
        if held is None or place in held
        else ShardDocument(document.tokens, document.prompt_length, None, None)
        for place, document in enumerate(documents)
    ]


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def alone(model, policy, documents, update=0):
    """Loss, sums and gradients of one process."""
    objective = make_objective(model.requires_grad_(True), Teacher.of(policy), **KEYS)
    objective.update = update
    loss, sums = objective.loss(documents, denominator=objective.count(documents))
    loss.backward()
    return loss.item(), sums, gradients_of(model)


def part(model, policy, documents, transport, held=None, update=0):
    """A rank's loss and sums, and the gradients summed over its group."""
    objective = make_context_objective(model.requires_grad_(True), Teacher.of(policy), transport, **KEYS)
    objective.update = update
    shards = shards_of(documents, transport, held)
    loss, sums = objective.loss(shards, denominator=objective.count(shards))
    loss.backward()
    TransportPeers(transport).sum_gradients(model.parameters())
    return loss.item(), sums, gradients_of(model)


def furthest(found, wanted):
    """The largest difference of any tensor, relative to its size if that is above 1."""
    assert found.keys() == wanted.keys()
    pairs = [(found[name].double(), tensor.double()) for name, tensor in wanted.items()]
    return max(float((own - tensor).abs().max() / tensor.abs().max().clamp_min(1)) for own, tensor in pairs)


def config_of(**changes):
    settings = {"lr": 1e-3, "updates": 2, "microbatch_tokens": 30, "passes": KEYS["passes"], "decay": KEYS["decay"]}
    return CotrainConfig(**settings | changes)


def trainer_of(model, policy, transport=None, peers=None, **changes):
    """A trainer, alone or as a rank of a group; ``peers`` are other than the group's ranks."""
    config, temperature = config_of(**changes), KEYS["temperature"]
    if transport is None:
        return Trainer(model, policy, config, temperature)
    teacher = Teacher.of(policy)
    keys = {"temperature": temperature, "passes": config.passes, "decay": config.decay}
    objective = make_context_objective(model, teacher, transport, **keys)
    return Trainer(model, policy, config, temperature, objective, teacher, peers or TransportPeers(transport))


def trained_by(trainer, documents, times=3):
    """The metrics of each training, and of a judgement after them; and the weights."""
    metrics = [trainer.train(documents) for _ in range(times)]
    metrics.append(trainer.judge(documents))
    return metrics, {name: tensor.clone() for name, tensor in trainer.weights.items()}


def rank_main(rank, world, folder):
    """A process that finds loss and gradients of each kind of model, and trains it."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    policy = policy_of()
    for kind in KINDS:
        transport = GroupTransport()
        model = model_of(kind, policy)
        documents = texts_of(model, policy)
        loss, _, gradients = part(model, policy, documents, transport)
        _save(gradients | {"loss": _number(loss)}, folder / f"{kind}-{rank}.safetensors")
        model = model_of(kind, policy)
        shards = shards_of(documents, transport)
        metrics, weights = trained_by(trainer_of(model, policy, transport), shards)
        _save(weights, folder / f"{kind}-weights-{rank}.safetensors")
        _save(numbers_of(metrics), folder / f"{kind}-metrics-{rank}.safetensors")
    dist.destroy_process_group()


def numbers_of(metrics):
    """Every number of several metrics, by its place and name."""
    return {f"{place}.{name}": _number(value) for place, each in enumerate(metrics) for name, value in each.items()}


def _number(value):
    return torch.tensor([value], dtype=torch.float64)


def _save(tensors, file):
    whole = torch.contiguous_format
    save_file({name: tensor.detach().clone(memory_format=whole) for name, tensor in tensors.items()}, file)
