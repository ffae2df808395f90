"""paceline inside your own vLLM: answers to the same prompts, three times, with drafts from what was said before.

.venv-vllm/bin/python examples/vllm_plugin.py [MODEL]
"""

import os
import sys

from vllm import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "examples/policies/sql-1m"
QUESTIONS = ("How many customers live in Brazil?", "List all genres.", "Which album has the most tracks?")


def drafts(llm):
    """Tokens that were drafted and accepted since the start, as vLLM counts them."""
    found = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return found["vllm:spec_decode_num_draft_tokens"], found["vllm:spec_decode_num_accepted_tokens"]


def main():
    """Three visits to the same prompts."""
    llm = LLM(
        model=MODEL,
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={
            "method": "custom_class",
            "model": "paceline.integrations.vllm.HistoryProposer",
            "num_speculative_tokens": 16,
        },
        additional_config={"paceline": {"budget": {"mode": "fixed"}}},
    )
    params = SamplingParams(temperature=1.0, max_tokens=96, n=8)
    before = drafts(llm)
    for visit in range(3):
        answers = llm.generate(list(QUESTIONS), params, use_tqdm=False)
        tokens = sum(len(sample.token_ids) for answer in answers for sample in answer.outputs)
        drafted, accepted = (now - then for now, then in zip(drafts(llm), before, strict=True))
        before = drafts(llm)
        print(f"visit {visit}: {tokens} tokens, {accepted / tokens:.0%} of them accepted drafts; {drafted:.0f} drafted")
    print(answers[0].outputs[0].text)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    main()
