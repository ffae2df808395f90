"""What docs/frameworks.md tells to copy reaches the plug-in as it means to, framework by framework."""

import functools
import re
import runpy
import shlex
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from paceline.integrations.verl.settings import vllm_options
from paceline.integrations.vllm.settings import settings_of

ROOT = Path(__file__).resolve().parents[3]
SECTIONS = dict(
    re.findall(
        r"^## (.+?)\n(.*?)(?=^## |\Z)", (ROOT / "docs/frameworks.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
)


def block(framework, language):
    return re.search(rf"^```{language}\n(.*?)^```", SECTIONS[framework], re.DOTALL | re.MULTILINE)[1]


def tree(assignments):
    """Nested settings from ``a.b=1``, as Hydra and OmegaConf read them."""
    found = {}
    for assignment in assignments:
        path, _, value = assignment.lstrip("+").partition("=")
        *parents, last = path.split(".")
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, found)[last] = yaml.safe_load(value)
    return found


def overrides(framework, prefix):
    words = shlex.split(block(framework, "bash").replace("\\\n", " "), comments=True)
    return tree(word for word in words if word.lstrip("+").startswith(prefix))


def checked(arguments):
    """The plug-in's settings, as vLLM hands it ``arguments``; they name the plug-in and eight tokens."""
    speculative = arguments["speculative_config"]
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("custom_class", 8)
    assert speculative["model"] == "paceline.integrations.vllm.HistoryProposer"
    config = settings_of(
        SimpleNamespace(
            additional_config=arguments["additional_config"],
            speculative_config=SimpleNamespace(**speculative),
            parallel_config=SimpleNamespace(world_size=1, distributed_executor_backend=None),
        )
    )
    assert (config.drafter.kind, config.drafter.budget, config.budget.mode) == ("history", 8, "adaptive")


def test_nemo_rl():
    checked(yaml.safe_load(block("NeMo RL", "yaml"))["policy"]["generation"]["vllm_kwargs"])


def test_prime_rl():
    checked(tomllib.loads(block("prime-rl", "toml"))["inference"]["vllm_extra"])


def test_skyrl():
    engine = overrides("SkyRL", "generator.")["generator"]["inference_engine"]
    checked({"speculative_config": engine["speculative_config"], **engine["engine_init_kwargs"]})


def test_areal():
    words = shlex.split(block("AReaL", "bash").replace("\\\n", " "))
    given = dict(pairwise(words))
    nested = tree(f"{key[2:]}={value}" for key, value in given.items() if key.startswith("--speculative-config."))
    checked(
        {
            "speculative_config": nested["speculative-config"],
            "additional_config": yaml.safe_load(given["--additional-config"]),
        }
    )


def test_verl():
    rollout = overrides("verl", "actor_rollout_ref.rollout.")["actor_rollout_ref"]["rollout"]
    assert rollout["name"] == "paceline"
    config = SimpleNamespace(engine_kwargs=rollout["engine_kwargs"], mtp=None, pipeline_model_parallel_size=1)
    checked(vllm_options(config, {}, 0))


def test_slime_names_hooks_that_exist():
    for name in re.findall(r"paceline\.integrations\.slime\.\w+", SECTIONS["slime"]):
        module, _, hook = name.rpartition(".")
        assert callable(getattr(sys.modules.get(module) or pytest.importorskip(module), hook))
    keys = yaml.safe_load(block("slime", "yaml"))
    assert set(keys) == {"paceline_log", "paceline_url"}


def test_openrlhfs_agent_completes_the_arguments_of_the_vllm_that_starts_next(monkeypatch):
    class Executor:
        """``SingleTurnAgentExecutor``, which takes the file of the reward function."""

        def __init__(self, remote_rm_url=None):
            self.reward = remote_rm_url

    for name in ("vllm", "openrlhf", "openrlhf.utils", "openrlhf.utils.agent"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].AsyncEngineArgs = dict
    sys.modules["openrlhf.utils.agent"].SingleTurnAgentExecutor = Executor
    monkeypatch.setenv("REWARD_FILE", "reward.py")
    agent = runpy.run_path(str(ROOT / "examples/frameworks/openrlhf_agent.py"))
    arguments = sys.modules["vllm"].AsyncEngineArgs(model="m", seed=1)
    assert (arguments["model"], arguments["seed"]) == ("m", 1)
    checked(arguments)
    assert agent["AgentExecutor"]().reward == "reward.py"
