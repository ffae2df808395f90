"""What the page of ``simulate --html`` is made of, without a browser: the command's setting, and what is refused."""

import json
import re

import msgspec
import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.schema import PacelineError
from paceline.simulate.drafting import Drift
from paceline.simulate.hardware import load_hardware
from paceline.simulate.page import Start, page_data, render, write_page
from paceline.simulate.projection import Scenario
from paceline.simulate.rlstep import Phases
from paceline.simulate.roofline import Roofline
from paceline.simulate.steptime import MeasuredStepTime
from paceline.sizes.shapes import load_shape

MEASURED = MeasuredStepTime.load("llama-3.1-8b-h100")
START = Start(scenario=Scenario(prompts=2, siblings=2), acceptance=(0.8,), draft_s=(0.0, 0.0))


def test_the_command_writes_the_page_of_what_it_simulates(tmp_path):
    options = "--prompts 4 --siblings 2 --mean-tokens 30 --slots 4 --engines 2 --repeats 3 --seed 7 --age-bound 1"
    options += " --acceptance .9,.6 --draft-ms 1,.5 --drafted 2 --phases train=3,data=1 --drift exponential:0.1:0.2"
    path = tmp_path / "page.html"
    done = CliRunner().invoke(
        app, ["simulate", "--cost", "llama-3.1-8b-h100", *options.split(), "--html", str(path)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    data = json.loads(re.search('id="data">(.*?)</script>', path.read_text())[1])
    scenario = Scenario(prompts=4, siblings=2, mean_tokens=30.0, slots=4, engines=2)
    own = {"scenario": scenario, "acceptance": (0.9, 0.6), "draft_s": (1e-3, 5e-4), "age_bound": 1, "repeats": 3}
    phases = Phases(generation=0.0, train=3.0, data=1.0)
    expected = page_data(Start(**own, phases=phases, drift=Drift("exponential", 0.1, 0.2), seed=7), MEASURED)
    assert data == json.loads(msgspec.json.encode(expected))
    assert data["start"] | {"fixed": 1e-3, "each": 5e-4, "lag": 1, "drift": 0.1, "refit": 1.0} == data["start"]


def test_a_page_that_cannot_be_is_refused_in_one_line(tmp_path):
    with pytest.raises(PacelineError, match="needs the model that they are of"):
        page_data(START, Roofline(load_shape("qwen3-8b"), load_hardware("h100")))
    with pytest.raises(PacelineError, match=r"--html .*cannot be written"):
        write_page(tmp_path / "no" / "page.html", START, MEASURED)
    (tmp_path / "table.json").write_text("[[1, 1, 0.1]]")
    with pytest.raises(PacelineError, match="tells no pass of 17 tokens a row"):
        page_data(START, MeasuredStepTime.load(str(tmp_path / "table.json")))


def test_a_page_names_no_other_place_and_nothing_of_it_can_be_loaded():
    page = render(START, MEASURED)
    assert not re.search(r"https?://|<link|<img|<iframe|@import|url\(|fetch\(", page)
    assert "default-src 'none'" in page
