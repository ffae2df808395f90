"""The page of ``simulate --html``, in a real browser: what it shows, follows, and agrees with."""

import itertools
import json
import random
from types import SimpleNamespace

import msgspec
import pytest

from browser import chromium, needs_browser
from paceline.simulate.breakdown import Layout
from paceline.simulate.drafting import Acceptance, Drafting, Drift, LinearDraftCost
from paceline.simulate.hardware import load_hardware
from paceline.simulate.page import Start, write_page
from paceline.simulate.projection import Scenario, project
from paceline.simulate.rlstep import Phases
from paceline.simulate.roofline import Roofline
from paceline.simulate.steptime import MeasuredStepTime
from paceline.sizes.shapes import load_shape

pytestmark = [*needs_browser]

SMALL = Scenario(prompts=12, siblings=4, prompt_tokens=100, mean_tokens=200.0, max_tokens=800, slots=16)
PHASES = Phases(generation=0.0, train=3.0, logprob=2.0, refit=0.5, drafter=0.2)
ACCEPTANCE = (0.8, 0.75, 0.7)
MEASURED = MeasuredStepTime.load("llama-3.1-8b-h100")
RECKONED = Roofline(load_shape("qwen3-30b-a3b"), load_hardware("h100"))
SLIDERS = (
    *("slots", "engines", "kv", "drafted", "acceptance", "fall", "fixed", "each", "drift", "stale", "prompts"),
    *("siblings", "prompt", "mean", "sigma", "longest", "train", "logprob", "refit", "drafter", "lag"),
)


def start(**changed):
    given = {"scenario": SMALL, "acceptance": ACCEPTANCE, "draft_s": (1e-3, 5e-4), "phases": PHASES}
    return Start(**{**given, **changed})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Pages that are opened again and again: of measured passes, and of reckoned ones."""
    folder = tmp_path_factory.mktemp("pages")
    write_page(folder / "measured.html", start(), MEASURED)
    write_page(folder / "reckoned.html", start(model="qwen3-30b-a3b"), RECKONED)
    return SimpleNamespace(measured=folder / "measured.html", reckoned=folder / "reckoned.html", folder=folder)


@pytest.fixture(scope="module")
def window():
    """One page, which keeps every request and every complaint of the console."""
    with chromium() as browser:
        page = browser.new_page()
        page.seen, page.wrong = [], []
        page.on("request", lambda request: page.seen.append(request.url))
        page.on("console", lambda message: page.wrong.append(message.text))
        page.on("pageerror", lambda error: page.wrong.append(str(error)))
        yield page


@pytest.fixture
def open_page(window):
    """Opens a file in the page, as if it had shown nothing before."""

    def opened(path, address="", width=800, scheme="light"):
        window.set_viewport_size({"width": width, "height": 500})
        window.emulate_media(color_scheme=scheme)
        window.goto("about:blank")
        window.seen.clear()
        window.wrong.clear()
        window.goto(path.as_uri() + address)
        return window

    return opened


def move(page, again=False, **places):
    """Moves sliders to places from 0 to 1, as a hand would, and gives what the page then says."""
    page.evaluate(
        """([again, places]) => {
            if (again) document.getElementById("reset").click();
            for (const [name, place] of Object.entries(places)) {
                const slider = document.getElementById("c-" + name);
                slider.value = Math.round(place * slider.max);
                slider.dispatchEvent(new Event("input", {bubbles: true}));
                slider.dispatchEvent(new Event("change", {bubbles: true}));
            }
            paceline.show();
        }""",
        [again, places],
    )
    return said(page)


def said(page):
    return page.evaluate(
        """() => {
            const {state, found} = paceline;
            const step = found.steps;
            return {state, verdict: document.querySelector("h1").textContent, speedups: found.speedups,
                best: found.best, chosen: found.chosen, adaptive: found.adaptive, mean: found.perForward,
                steps: found.stepSpeedups, plain: found.plainSeconds,
                drafted: found.draftedSeconds, ends: found.rows.map((rows) => rows.end),
                total: step.seconds(step.sides(1, 0), state.lag),
                shown: document.querySelector("main").innerText};
        }"""
    )


def test_a_page_loads_with_one_request_and_no_complaint_and_may_load_nothing_more(written, open_page):
    for path in (written.measured, written.reckoned):
        page = open_page(path)
        assert page.seen == [path.as_uri()]
        blocked = page.evaluate(
            """() => new Promise((resolve) => {
                document.addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
                new Image().src = "http://127.0.0.1:9/pixel.png";
                setTimeout(() => resolve("nothing"), 2000);
            })"""
        )
        assert blocked == "img-src"
        assert all("Content Security Policy" in line for line in page.wrong)
        assert path.stat().st_size < 1_500_000


def test_more_acceptance_is_never_slower_and_none_leaves_drafting_off(written, open_page):
    for path in (written.measured, written.reckoned):
        page = open_page(path)
        seen = [move(page, acceptance=place / 5) for place in range(6)]
        for worse, better in itertools.pairwise(seen):
            assert all(b >= w - 1e-9 for w, b in zip(worse["speedups"], better["speedups"], strict=True))
            assert better["best"] >= worse["best"]
        assert seen[0]["verdict"].startswith("Leave drafting off")
        assert (seen[0]["best"], seen[0]["chosen"]) == (0, 0)
        assert seen[5]["best"] > 3
        assert seen[5]["verdict"].startswith(f"Draft {seen[5]['best']}: rollouts {max(seen[5]['speedups']):.2f}×")


def test_every_slider_moves_what_it_must(written, open_page):
    page = open_page(written.measured)
    assert set(page.evaluate("[...document.querySelectorAll('input[type=range]')].map((each) => each.name)")) == set(
        SLIDERS
    )
    base = {"stale": 0.4, "drift": 0.1}
    before = move(page, **base)
    for name in SLIDERS:
        after = move(page, again=True, **{**base, name: 0.0 if name == "kv" else 0.9})
        assert after["state"][name] != before["state"][name], name
        assert after["shown"] != before["shown"], name
        now, then = after["speedups"][3], before["speedups"][3]
        if name in ("fall", "fixed", "each", "drift", "stale"):
            assert now < then - 1e-4, name
        elif name == "acceptance":
            assert now > then + 1e-4
        elif name in ("prompts", "siblings", "mean"):
            assert after["plain"] > before["plain"] * 1.5, name
        elif name in ("train", "logprob", "refit"):
            assert 1 < after["steps"][3] < before["steps"][3] - 1e-4, name
        elif name == "drafter":
            assert after["steps"][3] < before["steps"][3] - 1e-4
        elif name == "lag":
            assert after["total"] < before["total"] - 1e-4
        elif name == "drafted":
            assert after["chosen"] == 14


def test_figures_are_those_of_the_simulator(tmp_path, open_page):
    """Speedups within 3 % (adaptive lengths 4 %), the seconds of the first plain rollout within 3 %."""
    harder = msgspec.structs.replace
    for number, (scenario, rates, lag) in enumerate(
        (
            (SMALL, ACCEPTANCE, 0),
            (harder(SMALL, engines=3, slots=4, sigma=1.1), (0.9,), 2),
            (harder(SMALL, sigma=0.0), (0.6,), 1),
            (harder(SMALL, kv_tokens=3000), ACCEPTANCE, 0),
            (harder(SMALL, prompts=40, siblings=1, prompt_tokens=700, mean_tokens=60.0), (0.7, 0.9), 0),
        )
    ):
        cost = LinearDraftCost("measured", "given", fixed=1e-3, per_position=5e-4)
        truth = project(
            scenario,
            MEASURED,
            Drafting(Acceptance(rates), cost),
            (1, 7, "adaptive"),
            drafting="given",
            repeats=3,
            phases=PHASES,
            age_bound=lag,
        )
        write_page(
            tmp_path / f"{number}.html", start(scenario=scenario, acceptance=rates, age_bound=lag, repeats=3), MEASURED
        )
        seen = said(open_page(tmp_path / f"{number}.html"))
        for one in truth.projected:
            place = None if one.drafted == "adaptive" else int(one.drafted)
            speedup = seen["adaptive"] if place is None else seen["speedups"][place]
            assert speedup == pytest.approx(one.speedup, rel=0.04 if place is None else 0.03), (number, one.drafted)
            if place is not None:
                assert seen["mean"][place] == pytest.approx(one.tokens_per_forward, rel=0.04)
                assert seen["steps"][place] == pytest.approx(one.step.speedup, rel=0.03)
        assert seen["plain"] == pytest.approx(truth.projected[0].plain_seconds, rel=0.03)
        assert seen["ends"] == [pytest.approx(seen["plain"], rel=0.01), pytest.approx(seen["drafted"], rel=0.1)]


def test_passes_of_every_engine_are_the_rooflines(written, open_page):
    page = open_page(written.reckoned)
    chance = random.Random(3)
    asked = []
    for model, gpu, tensor, precision in (
        ("qwen3-30b-a3b", "h100", 1, "bf16"),
        ("qwen3.5-122b-a10b", "gb200", 4, "fp8"),
        ("llama-3.1-70b", "a100", 8, "bf16"),
        ("qwen3-235b-a22b", "h200", 16, "fp8"),
    ):
        time = Roofline(load_shape(model), load_hardware(gpu), Layout(tensor=tensor), precision=precision)
        for _ in range(25):
            rows = chance.choice((1, 3, 8, 64, 200, 1000))
            place = (rows, rows * chance.randint(1, 17), rows * chance.randint(0, 20_000))
            asked.append(((model, gpu, str((1, 2, 4, 8, 16).index(tensor)), precision), place, time.seconds(*place)))
    found = page.evaluate(
        """(asked) => {
            const data = JSON.parse(document.getElementById("data").textContent);
            return asked.map(([[model, hardware, layout, precision], place]) =>
                law.stepTime(data, {model, hardware, layout, precision})(...place));
        }""",
        [[list(engine), list(place)] for engine, place, _ in asked],
    )
    for (engine, place, seconds), here in zip(asked, found, strict=True):
        assert here == pytest.approx(seconds, rel=0.02), (engine, place)


def test_passes_between_measured_ones_are_as_they_were_measured(tmp_path, open_page):
    points = [
        {"rows": rows, "tokens": rows * each, "seconds": [0.01 + 1e-3 * rows * each + 4e-4 * rows + per * held**0.5]}
        | {"kv_tokens": rows * held}
        for rows, per in ((1, 1e-4), (3, 2e-4), (10, 1e-3))
        for each in (1, 4, 9)
        for held in (64, 1024)
    ]
    (tmp_path / "table.json").write_text(json.dumps({"points": points}))
    step = MeasuredStepTime.load(str(tmp_path / "table.json"))
    write_page(tmp_path / "page.html", start(scenario=msgspec.structs.replace(SMALL, slots=8)), step)
    page = open_page(tmp_path / "page.html")
    places = [
        (rows, rows * each, rows * held)
        for rows in range(1, 11)
        for each in range(1, 18)
        for held in (0, 64, 300, 5000)
    ]
    found = page.evaluate(
        """(places) => {
            const time = law.stepTime(JSON.parse(document.getElementById("data").textContent), {});
            return places.map((place) => time(...place));
        }""",
        places,
    )
    assert found == pytest.approx([step.seconds(*place) for place in places], rel=2e-3)
    assert move(page, slots=1.0)["state"]["slots"] == 8  # of 1, 2, 3, 4, 6, 8: ten rows were measured, not twelve


def test_the_address_holds_the_setting_and_is_believed_only_where_it_makes_sense(written, open_page):
    page = open_page(written.reckoned)
    page.select_option("#c-model", "qwen3-32b")
    page.select_option("#c-layout", "2")
    seen = move(page, acceptance=0.31, mean=0.7, each=0.5, drafted=0.25, lag=0.5)
    address = page.evaluate("location.hash")
    again = said(open_page(written.reckoned, address))
    assert again == seen
    assert (again["state"]["model"], again["state"]["drafted"], again["state"]["lag"]) == ("qwen3-32b", 4, 2)
    page = open_page(written.reckoned)
    plain = said(page)
    for wrong in (
        "#acceptance=NaN&slots=-4&mean=1e99&lag=0.5&prompts=",
        "#model=%3Cscript%3Ealert(1)%3C/script%3E&hardware=..%2Fh100&layout=99&precision=fp4",
        "#__proto__=1&constructor=2&drafted=bestest&a=b&&=&%E0%A4%A",
        "#slots=64;drop",
    ):
        page.evaluate(
            """(wrong) => new Promise((resolve) => {
                addEventListener("hashchange", resolve, {once: true});
                location.hash = wrong;
            }).then(() => 0)""",
            wrong,
        )
        page.evaluate("paceline.show()")
        assert said(page) == plain, wrong
    assert page.wrong == []


def test_a_page_of_measured_passes_offers_no_other_engine(written, open_page):
    page = open_page(written.measured)
    assert page.locator("select").count() == 0
    assert "h200" not in written.measured.read_text()
    assert "Measured passes llama-3.1-8b-h100" in page.inner_text(".run")
    assert "nothing here is reckoned from data sheets" in page.inner_text("#honest")
    reckoned = open_page(written.reckoned)
    assert [each.get_attribute("name") for each in reckoned.locator("select").all()] == [
        *("model", "hardware", "layout", "precision")
    ]
    assert "Reckoned passes roofline of qwen3-30b-a3b on h100" in reckoned.inner_text(".run")
    assert "never measured" in reckoned.inner_text("#honest")


def test_an_engine_that_cannot_be_is_not_offered_or_said_not_to_fit(written, open_page):
    page = open_page(written.reckoned)
    page.select_option("#c-precision", "fp8")
    page.select_option("#c-hardware", "a100")
    page.evaluate("paceline.show()")
    assert said(page)["state"]["precision"] == "bf16"
    assert page.locator("#c-precision option[value=fp8]").is_disabled()
    page.select_option("#c-model", "qwen3-235b-a22b")
    page.evaluate("paceline.show()")
    weights = Roofline(load_shape("qwen3-235b-a22b"), load_hardware("a100")).weight_bytes()
    assert said(page)["verdict"] == (
        f"Does not fit: {weights / 1e9:.0f} GB of weights a GPU, where an engine has 72 GB."
    )
    assert page.locator("body.troubled").count() == 1


def test_keys_move_sliders_that_have_names_and_speak(written, open_page):
    page = open_page(written.measured)
    page.focus("#c-acceptance")
    page.keyboard.press("ArrowLeft")
    page.evaluate("paceline.show()")
    assert said(page)["state"]["acceptance"] == pytest.approx(0.79)
    assert page.get_attribute("#c-acceptance", "aria-valuetext") == "79\xa0%"
    page.focus("#c-best")
    page.keyboard.press("Space")
    page.evaluate("paceline.show()")
    assert said(page)["state"]["drafted"] == said(page)["best"]
    names = page.evaluate(
        "[...document.querySelectorAll('input, select')].map((each) => each.labels[0] && each.labels[0].innerText)"
    )
    assert all(names)
    assert all(page.evaluate("[...document.querySelectorAll('[role=img]')].map((each) => each.ariaLabel)"))


def test_a_click_on_the_map_goes_there(written, open_page):
    page = open_page(written.measured)
    page.locator("#heat canvas").scroll_into_view_if_needed()
    box = page.locator("#heat canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] * (7.5 / 16), box["y"] + box["height"] * 0.25)
    page.evaluate("paceline.show()")
    seen = said(page)
    assert (seen["state"]["drafted"], seen["state"]["acceptance"]) == (8, pytest.approx(0.75, abs=0.011))


def test_nothing_is_wider_than_the_window(written, open_page):
    for width, scheme in ((390, "dark"), (800, "light"), (1280, "light")):
        page = open_page(written.reckoned, width=width, scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.wrong == []


def test_names_cannot_end_the_data(tmp_path, open_page):
    step = MeasuredStepTime.load("llama-3.1-8b-h100")
    step.source = "</script><script>window.broken = 1</script><!--"
    write_page(tmp_path / "page.html", start(), step)
    page = open_page(tmp_path / "page.html")
    assert page.evaluate("window.broken") is None
    assert page.inner_text("#source") == step.source
    assert page.wrong == []


def test_the_page_starts_with_what_the_command_was_given(tmp_path, open_page):
    fade = Drift("linear", 0.1, 0.5)
    write_page(tmp_path / "page.html", start(acceptance=(0.9, 0.4, 0.6, 0.5), drift=fade, trained=3), MEASURED)
    page = open_page(tmp_path / "page.html")
    rates = page.evaluate(
        """() => {
            const data = JSON.parse(document.getElementById("data").textContent);
            return law.rates(paceline.state, data.bend, data.fade);
        }"""
    )
    assert rates == pytest.approx([0.7 * rate for rate in (0.9, 0.4, 0.6, *[0.5] * 13)])
    assert "--prompts 12 --siblings 4" in page.inner_text("#command")
    assert "--cost llama-3.1-8b-h100" in page.inner_text("#command")
    assert "train=3,logprob=2,refit=0.5,drafter=0.2" in page.inner_text("#command")
