"""Ask a model the same questions again and again: what it said before is drafted, what it says is its own law's.

    python examples/transformers_generate.py

The first round has nothing to draft from. Greedy answers of later rounds are those of plain ``generate``, which is
checked, in a fraction of the passes; sampled ones follow its law.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.integrations.transformers import Speculation

POLICY = "examples/policies/sql-1m"
QUESTIONS = [
    "How many tracks are longer than 4 minutes?",
    "How much was sold of 'Falamansa'?",
    "Which albums are by AC/DC?",
]


def main():
    """Three rounds greedily, three at temperature 0.7."""
    torch.set_num_threads(1)  # a model this small runs fastest on one
    model = AutoModelForCausalLM.from_pretrained(
        POLICY, dtype="float32", attn_implementation="sdpa", use_safetensors=True
    )
    tokenizer = AutoTokenizer.from_pretrained(POLICY, padding_side="left")
    inputs = tokenizer(QUESTIONS, return_tensors="pt", padding=True)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=96)
    speculate = Speculation()
    torch.manual_seed(0)
    for temperature in (0, 0, 0, 0.7, 0.7, 0.7):
        law = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        said = model.generate(**inputs, **law, custom_generate=speculate, max_new_tokens=96)
        stats = speculate.stats
        same = f"equal to plain generate: {torch.equal(said, plain)}" if not temperature else ""
        per_pass = stats.tokens_emitted / stats.row_forwards
        print(f"temperature {temperature:3.1f}  {per_pass:5.2f} tokens a forward  {same}", flush=True)
    print(tokenizer.decode(said[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
