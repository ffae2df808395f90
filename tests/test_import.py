"""Importing paceline or asking it for help loads nothing heavy, and every public name resolves."""

import subprocess
import sys

import pytest

import paceline

HEAVY = ("torch", "transformers", "peft", "matplotlib", "pandas", "scipy", "datasets", "accelerate", "tokenizers")


def loaded(code: str) -> set[str]:
    """The top-level modules that ``code`` loads in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint('|', *sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("|")[2].split())


HELP = """
import sys
from paceline.cli import main
sys.argv = ["paceline", *{arguments}]
try:
    main()
except SystemExit as done:
    assert done.code == 0, done.code
"""


@pytest.mark.parametrize(
    "code",
    [
        "import paceline",
        "import paceline.config; paceline.config.load_config()",
        "import paceline.cli",
        "import paceline.report.metrics, paceline.report.trace, paceline.report.live, paceline.report.html",
        "import paceline.simulate.run, paceline.simulate.plot",
        HELP.format(arguments=["--help"]),
        HELP.format(arguments=["train", "--help"]),
        HELP.format(arguments=["--version"]),
        HELP.format(arguments=["config", "rl.steps=3"]),
    ],
    ids=["paceline", "config", "cli", "report", "replay", "help", "train help", "version", "config command"],
)
def test_nothing_heavy_is_loaded(code):
    assert loaded(code).isdisjoint(HEAVY)


def test_importing_paceline_alone_loads_no_third_party_module():
    others = loaded("import paceline") - loaded("pass") - set(sys.stdlib_module_names)
    assert others == {"paceline"}


def test_the_version_takes_no_numpy_to_print():
    assert "numpy" not in loaded("import paceline")
    assert "numpy" not in loaded(HELP.format(arguments=["--version"]))


@pytest.mark.parametrize("name", paceline.__all__)
def test_every_public_name_resolves(name):
    assert getattr(paceline, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'absent'"):
        paceline.absent  # noqa: B018


def test_the_door_into_trl_is_found_by_its_short_name():
    from paceline.integrations import trl

    assert paceline.trl.rollout_func is trl.rollout_func
