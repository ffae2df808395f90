"""``paceline config``: what would a run use?"""

from typing import Annotated

import typer

from paceline.cli.common import JsonPath, Overrides, one_line_errors, write_json
from paceline.terminal import say


def config(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    json_path: JsonPath = None,
) -> None:
    """Print the effective configuration.

    Defaults are included. What cannot be honoured is named in one line, with the nearest known key.
    """
    with one_line_errors():
        from paceline.config import dump_config, load_config

        given = overrides or []
        if config is not None and "=" in config:  # no file, only overrides
            given = [config, *given]
            config = None
        effective = load_config(config, given)
        say(dump_config(effective), end="")
        write_json(json_path, effective)
