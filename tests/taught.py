"""Documents that drafters learn from: random tokens with a policy's states."""

import numpy as np
import torch

from paceline.cotrain.documents import Document
from paceline.forward.taps import FINAL, Taps
from tiny_models import VOCABULARY

# (length, length of the prompt): prompts of one token, responses of one, and a document shorter than the passes.
SHAPES = ((12, 4), (9, 1), (4, 2), (7, 6), (15, 11))


def documents_of(policy, layers, shapes=SHAPES, seed=0):
    """Random token sequences with the policy's states."""
    generator = np.random.default_rng(seed)
    taps = Taps(policy, (*layers, FINAL))
    documents = []
    for length, prompt in shapes:
        tokens = generator.integers(0, VOCABULARY, length).astype(np.int32)
        with taps.watching(), torch.no_grad():
            policy(input_ids=torch.from_numpy(tokens[:-1]).long()[None])
        states_PX = taps.take()[0]
        width = policy.config.hidden_size
        documents.append(Document(tokens, prompt, states_PX[:, :-width], states_PX[:, -width:]))
    taps.close()
    return documents
