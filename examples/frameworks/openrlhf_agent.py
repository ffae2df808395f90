"""OpenRLHF's rollouts drafted by paceline: ``--train.agent_func_path examples/frameworks/openrlhf_agent.py``.

OpenRLHF 0.11 has no argument that reaches vLLM's ``speculative_config``. It loads this file in the actor that is about
to start vLLM, before it makes vLLM's arguments; so they are completed here. The reward function is a file of yours,
``REWARD_FILE`` in the environment, with OpenRLHF's ``reward_func(queries, prompts, labels)``.
"""

import functools
import os

import vllm
from openrlhf.utils.agent import SingleTurnAgentExecutor

from paceline.integrations.frameworks import engine_arguments

SETTINGS = {"drafter": {"budget": 8}}

vllm.AsyncEngineArgs = functools.partial(vllm.AsyncEngineArgs, **engine_arguments(SETTINGS))


class AgentExecutor(SingleTurnAgentExecutor):
    """OpenRLHF's own generation of one turn, with the reward function of ``REWARD_FILE``."""

    def __init__(self):
        super().__init__(os.environ["REWARD_FILE"])
