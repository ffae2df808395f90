"""What the engine reads from a model's directory or hub id."""

from pathlib import Path

from paceline.sampling.stops import Decode


def default_eos_ids(model: str | Path) -> tuple[int, ...]:
    """The ids that end a response by the model's generation configuration, or else its own."""
    from transformers import AutoConfig, GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(str(model)).eos_token_id
    except OSError:
        eos = AutoConfig.from_pretrained(str(model)).eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)


def text_of(tokenizer: str | Path) -> tuple[Decode, int | None]:
    """Token ids to text with a tokenizer of transformers, special tokens left out; and its end of sequence."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(tokenizer))
    return lambda tokens: str(loaded.decode(list(tokens), skip_special_tokens=True)), loaded.eos_token_id
