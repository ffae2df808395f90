"""What the engine reads from a model's directory or hub id."""

from pathlib import Path

from paceline.files import named
from paceline.forward.model_files import fetched, load_config, load_generation_config, load_tokenizer, model_source
from paceline.sampling.stops import Decode


def default_eos_ids(model: str | Path) -> tuple[int, ...]:
    """The ids that end a response by the model's generation configuration, or else its own."""
    source = model_source(str(model), "model")
    folder = fetched(source, f"model={named(model)}", weights=False)
    settings = load_generation_config(folder) or load_config(source, f"model={named(model)}")
    eos = settings.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)


def text_of(tokenizer: str | Path) -> tuple[Decode, int | None]:
    """Token ids to text with a tokenizer of transformers, special tokens left out; and its end of sequence."""
    source = Path(tokenizer).expanduser()
    loaded = load_tokenizer(source if source.exists() else str(tokenizer), f"tokenizer={named(tokenizer)}")
    return lambda tokens: str(loaded.decode(list(tokens), skip_special_tokens=True)), loaded.eos_token_id
