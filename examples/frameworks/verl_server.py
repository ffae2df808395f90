"""verl's own vLLM server with paceline in it, on a CPU: three visits to the same prompts, the last at another step.

VERL_USE_EXTERNAL_MODULES=paceline.integrations.verl python examples/frameworks/verl_server.py [MODEL]

Needs verl, Ray and a vLLM in one environment. Replica, server and worker are what verl's registry gives for the rollout
``paceline``. There is no trainer: verl moves weights by CUDA alone, so the step is told without new weights.
"""

import os
import sys

import ray
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class

MODEL = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "examples/policies/sql-1m")
QUESTIONS = ("How many customers live in Brazil?", "List all genres.", "Which album has the most tracks?")


def rollout_config():
    """``actor_rollout_ref.rollout`` of a run; the drafter's settings are under ``engine_kwargs.paceline``."""
    return RolloutConfig(
        name="paceline",
        dtype="float32",
        load_format="auto",
        enforce_eager=True,
        enable_sleep_mode=False,
        free_cache_engine=False,
        tensor_model_parallel_size=1,
        max_num_seqs=24,
        max_model_len=256,
        max_num_batched_tokens=1024,
        prompt_length=128,
        response_length=96,
        calculate_log_probs=True,
        engine_kwargs={"vllm": {}, "paceline": {"drafter": {"budget": 8}, "budget": {"mode": "fixed"}}},
    )


def rollouts(server, tokenizer, visit):
    """Eight answers to each question; prints what was drafted."""
    before = ray.get(server.paceline_report.remote())
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
    asked = [
        server.generate.remote(
            prompt_ids=tokenizer.encode(question), sampling_params=dict(params), request_id=f"{visit}/{at}/{sibling}"
        )
        for at, question in enumerate(QUESTIONS)
        for sibling in range(8)
    ]
    answers = ray.get(asked)
    after = ray.get(server.paceline_report.remote())
    drafted, accepted = (after[name] - before[name] for name in ("tokens_drafted", "tokens_accepted"))
    tokens = sum(len(answer.token_ids) for answer in answers)
    assert all(len(answer.log_probs) == len(answer.token_ids) for answer in answers)
    steps = {answer.extra_fields["global_steps"] for answer in answers}
    print(
        f"visit {visit}: {tokens} tokens, {accepted / tokens:.0%} of them accepted drafts; {drafted} drafted; "
        f"step {steps}, the drafter's version {after['weight_version']}",
        flush=True,
    )
    return answers


def main():
    """Three visits, with verl's cue of a weight update before the last."""
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    config, model = rollout_config(), HFModelConfig(path=MODEL, use_remove_padding=False)
    replica = get_rollout_replica_class("paceline")(0, config, model, gpus_per_node=1)
    name = f"{replica._get_server_name_prefix()}server_0_0"
    server = replica.server_class.options(name=name, max_concurrency=100).remote(
        config=config,
        model_config=model,
        rollout_mode=RolloutMode.STANDALONE,
        workers=[],
        replica_rank=0,
        node_rank=0,
        gpus_per_node=1,
        nnodes=1,
        cuda_visible_devices="",
    )
    ray.get(server.launch_server.remote())
    rollouts(server, model.tokenizer, 0)
    rollouts(server, model.tokenizer, 1)
    ray.get(server.set_global_steps.remote(1))
    rollouts(server, model.tokenizer, 2)
    ray.shutdown()


if __name__ == "__main__":
    main()
