"""The frameworks' own packages still have what docs/frameworks.md and the code rely on, read in their wheels.

``make wheels`` fetches them. Nothing of them is imported: most need a GPU, or what this environment cannot have.
"""

import ast
import inspect
import os
import zipfile
from pathlib import Path

import pytest

WHEELS = Path(os.environ.get("PACELINE_WHEELS", Path(__file__).resolve().parents[3] / ".wheels"))


def source(package: str, module: str) -> ast.Module:
    """The syntax tree of a module in a framework's wheel."""
    found = sorted(WHEELS.glob(f"{package}-*.whl"))
    if not found:
        pytest.skip(f"no wheel of {package} in {WHEELS.name}: make wheels")
    with zipfile.ZipFile(found[-1]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(f"/{module}") or name == module]
        return ast.parse(wheel.read(name))


def function(tree: ast.AST, *path: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The function or method at ``path``, names from the outside in."""
    for name in path:
        (tree,) = [node for node in ast.walk(tree) if getattr(node, "name", None) == name]
    assert isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef)
    return tree


def parameters(of: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [argument.arg for argument in of.args.args]


def at(tree: ast.AST, text: str) -> int:
    """The first line whose code is ``text``; the test fails where there is none."""
    wanted = ast.unparse(ast.parse(text).body[0])
    lines = [getattr(node, "lineno", 0) for node in ast.walk(tree) if wanted == _unparsed(node)]
    assert lines, f"no {text!r}"
    return min(lines)


def _unparsed(node: ast.AST) -> str | None:
    return ast.unparse(node) if isinstance(node, ast.expr | ast.stmt) else None


VERL = "verl/workers/rollout"


def test_verl_asks_the_hooks_of_its_server_before_it_starts_vllm():
    server = source("verl", f"{VERL}/vllm_rollout/vllm_async_server.py")
    assert parameters(function(server, "vLLMHttpServer", "_preprocess_engine_kwargs")) == ["self", "engine_kwargs"]
    assert parameters(function(server, "vLLMHttpServer", "_get_worker_extension_cls")) == ["self"]
    launch = function(server, "vLLMHttpServer", "launch_server")
    asked = at(launch, "self._preprocess_engine_kwargs(engine_kwargs)")
    extended = at(launch, "self._get_worker_extension_cls()")
    given = at(launch, "build_cli_args_from_config(args)")
    assert asked < extended < given
    spread = [node for node in ast.walk(launch) if isinstance(node, ast.Dict) and None in node.keys]
    assert any(ast.unparse(node.values[node.keys.index(None)]) == "engine_kwargs" for node in spread)


def test_verl_tells_its_server_the_step_of_the_weights_after_they_are_loaded():
    server = source("verl", f"{VERL}/vllm_rollout/vllm_async_server.py")
    told = function(server, "vLLMHttpServer", "set_global_steps")
    assert isinstance(told, ast.AsyncFunctionDef)
    assert parameters(told) == ["self", "global_steps"]
    update = function(source("verl", f"{VERL}/vllm_rollout/vllm_rollout.py"), "ServerAdapter", "update_weights")
    assert at(update, "sender.async_send_weights(weights)") < at(
        update, "self.server_handle.set_global_steps.remote(global_steps)"
    )


def test_verl_starts_the_server_class_of_its_replica_under_the_rollouts_name():
    server = source("verl", f"{VERL}/vllm_rollout/vllm_async_server.py")
    assert at(function(server, "vLLMReplica", "__init__"), "self.server_class = ray.remote(vLLMHttpServer)")
    launch = function(server, "vLLMReplica", "launch_servers")
    assert at(launch, "self._get_server_name_prefix()")
    assert "self.server_class.options" in ast.unparse(launch)
    adapter = source("verl", f"{VERL}/vllm_rollout/vllm_rollout.py")
    prefix = function(adapter, "ServerAdapter", "_get_server_name_prefix")
    assert "self.config.get('name', 'vllm')" in ast.unparse(prefix)


def test_verl_looks_rollouts_up_in_its_two_registries():
    register = function(source("verl", f"{VERL}/replica.py"), "RolloutReplicaRegistry", "register")
    assert parameters(register) == ["cls", "name", "loader"]
    base = source("verl", f"{VERL}/base.py")
    (registry,) = [
        node.value
        for node in ast.walk(base)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_ROLLOUT_REGISTRY"
    ]
    known = ast.literal_eval(registry)
    assert known["vllm", "async"] == "verl.workers.rollout.vllm_rollout.ServerAdapter"
    assert parameters(function(base, "get_rollout_class"))[0] == "rollout_name"
    assert "VERL_USE_EXTERNAL_MODULES" in ast.unparse(source("verl", "verl/__init__.py"))


def test_verls_replica_and_server_methods_that_are_overridden_here_exist_there():
    """Every method that paceline's classes define and that is not paceline's own is one of verl's."""
    path = Path(inspect.getsourcefile(pytest.importorskip("paceline.integrations.verl"))).parent / "rollout.py"
    own = ast.parse(path.read_text(encoding="utf-8"))
    server = source("verl", f"{VERL}/vllm_rollout/vllm_async_server.py")
    for mine, theirs in (("Server", "vLLMHttpServer"), ("Replica", "vLLMReplica")):
        (kind,) = [node for node in ast.walk(own) if isinstance(node, ast.ClassDef) and node.name == mine]
        for method in kind.body:
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not method.name.startswith("paceline_"):
                assert type(function(server, theirs, method.name)) is type(method)


def test_skyrl_passes_both_arguments_on_to_vllm():
    config = source("skyrl", "skyrl/train/config/config.py")
    (engine,) = [
        node for node in ast.walk(config) if isinstance(node, ast.ClassDef) and node.name == "InferenceEngineConfig"
    ]
    fields = {ast.unparse(node.target) for node in engine.body if isinstance(node, ast.AnnAssign)}
    assert {"speculative_config", "engine_init_kwargs"} <= fields
    utils = source("skyrl", "skyrl/backends/skyrl_train/inference_servers/utils.py")
    text = ast.unparse(utils)
    assert "args.speculative_config = spec_cfg" in text
    assert "engine_kwargs = get_config_as_dict(ie_cfg.engine_init_kwargs)" in text


def test_openrlhf_loads_the_agents_file_before_it_makes_vllms_arguments():
    actor = source("openrlhf", "openrlhf/trainer/ray/vllm_engine.py")
    start = function(actor, "RolloutRayActor", "__init__")
    assert at(start, "_load_agent_executor(agent_func_path)") < at(start, "vllm.AsyncEngineArgs(*args, **self.kwargs)")
    load = ast.unparse(function(actor, "_load_agent_executor"))
    assert "hasattr(agent_module, 'AgentExecutor')" in load
    assert "return agent_executor_cls()" in load
    assert "'--train.agent_func_path'" in ast.unparse(source("openrlhf", "openrlhf/cli/train_ppo_ray.py"))


def test_areal_has_no_setting_for_either_argument_and_takes_servers_that_were_started_by_hand():
    config = source("areal", "areal/api/cli_args.py")
    (vllm,) = [node for node in ast.walk(config) if isinstance(node, ast.ClassDef) and node.name == "vLLMConfig"]
    fields = {ast.unparse(node.target) for node in vllm.body if isinstance(node, ast.AnnAssign)}
    assert fields.isdisjoint({"speculative_config", "additional_config"})
    assert "AREAL_LLM_SERVER_ADDRS" in ast.unparse(source("areal", "areal/infra/remote_inf_engine.py"))
    server = ast.unparse(source("areal", "areal/engine/vllm_ext/areal_vllm_server.py"))
    assert "make_arg_parser" in server
