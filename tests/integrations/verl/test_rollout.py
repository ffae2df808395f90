"""The rollout in verl's place: verl's own classes stand in, with the methods that version 0.9.1 calls."""

import asyncio
import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

REPLICAS, ROLLOUTS, SERVERS = (
    f"verl.workers.rollout.{name}" for name in ("replica", "base", "vllm_rollout.vllm_async_server")
)


class BaseServer:
    """``vLLMHttpServer``: a launch asks its hooks, weights that were loaded are told by their step."""

    def __init__(self, config, engine):
        self.config, self.engine, self.replica_rank, self.global_steps = config, engine, 2, None

    def launched(self):
        options = dict(self.config.engine_kwargs["vllm"])
        self._preprocess_engine_kwargs(options)
        return {"worker_extension_cls": self._get_worker_extension_cls(), **options}

    def _preprocess_engine_kwargs(self, engine_kwargs):
        engine_kwargs["asked"] = True

    def _get_worker_extension_cls(self):
        return "verl's"

    async def set_global_steps(self, global_steps):
        self.global_steps = global_steps


class BaseReplica:
    def __init__(self, replica_rank, config):
        self.config, self.replica_rank, self.server_class = config, replica_rank, "verl's"

    def _get_server_name_prefix(self):
        return "vllm_"


class Registry:
    loaders: dict

    @classmethod
    def register(cls, name, loader):
        cls.loaders[name] = loader


@pytest.fixture
def verl(monkeypatch):
    """paceline's modules imported beside the stand-ins, and forgotten afterwards."""
    Registry.loaders = {}
    told = SimpleNamespace(replicas=Registry.loaders, rollouts={})
    contents = {
        REPLICAS: {"RolloutReplicaRegistry": Registry},
        ROLLOUTS: {"_ROLLOUT_REGISTRY": told.rollouts},
        SERVERS: {"vLLMHttpServer": BaseServer, "vLLMReplica": BaseReplica},
        "ray": {"remote": lambda kind: ("actor", kind)},
    }
    for name, attributes in contents.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            package = ".".join(parts[:depth])
            if package not in contents or package == name:
                module = ModuleType(package)
                module.__spec__ = ModuleSpec(package, None)
                monkeypatch.setitem(sys.modules, package, module)
        vars(sys.modules[name]).update(attributes)
    for name in [name for name in sys.modules if name.startswith("paceline.integrations.verl")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("paceline.integrations.verl")
    yield told
    for name in [name for name in sys.modules if name.startswith("paceline.integrations.verl")]:
        del sys.modules[name]


def config(**paceline):
    return SimpleNamespace(
        name="paceline",
        engine_kwargs={"vllm": {"seed": 1}, "paceline": paceline},
        mtp=None,
        pipeline_model_parallel_size=1,
    )


class Engine:
    """vLLM's engine with two workers, of which the first drafts."""

    def __init__(self, reports=({"drafted": 5}, None)):
        self.calls, self.reports = [], reports

    async def collective_rpc(self, method, args):
        self.calls.append((method, args))
        return list(self.reports)


def test_both_registries_know_the_rollout(verl):
    assert set(verl.replicas) == {"paceline"}
    assert verl.rollouts == {("paceline", "async"): "verl.workers.rollout.vllm_rollout.ServerAdapter"}


def test_a_replica_starts_servers_that_draft_under_the_name_that_the_trainer_looks_for(verl):
    replica = verl.replicas["paceline"]()(0, config())
    kind, server = replica.server_class
    assert (kind, server.__mro__[1]) == ("actor", BaseServer)
    assert replica._get_server_name_prefix() == "paceline_"


def test_a_server_is_launched_with_the_drafter_beside_verls_own_options(verl):
    _, server = verl.replicas["paceline"]()(0, config()).server_class
    options = server(config(drafter={"budget": 3}, snapshot="h.plh"), Engine()).launched()
    assert (options["seed"], options["asked"]) == (1, True)
    assert options["speculative_config"]["num_speculative_tokens"] == 3
    assert options["additional_config"]["paceline"]["snapshot"] == "h-2.plh"
    assert options["worker_extension_cls"] == "paceline.integrations.verl.worker.Worker"


def test_the_drafter_hears_of_every_weight_update_and_says_what_it_did(verl):
    _, kind = verl.replicas["paceline"]()(0, config()).server_class
    server = kind(config(), Engine())
    asyncio.run(server.set_global_steps(7))
    assert server.global_steps == 7
    assert server.engine.calls == [("paceline_plugin", ("on_weights", 7))]
    assert asyncio.run(server.paceline_report()) == {"drafted": 5}


def test_without_a_drafter_a_server_is_verls_and_has_nothing_to_report(verl):
    _, kind = verl.replicas["paceline"]()(0, config()).server_class
    server = kind(config(drafter={"budget": 0}), Engine(reports=(None, None)))
    assert "speculative_config" not in server.launched()
    asyncio.run(server.set_global_steps(1))
    assert server.global_steps == 1
    assert asyncio.run(server.paceline_report()) == {}
