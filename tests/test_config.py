"""Every setting is honoured or refused with one line that says where it was set."""

from pathlib import Path

import msgspec
import pytest
import yaml

from paceline.config import Config, ConfigError, LoraConfig, TaskConfig, dump_config, known_keys, load_config
from paceline.schema import Grammar, PacelineError, SamplingParams


@pytest.fixture
def write(tmp_path: Path):
    def write_run(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_run


def refusal(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_no_file_and_no_override_give_the_defaults():
    assert load_config() == Config()


def test_a_refusal_is_an_error_of_paceline():
    assert issubclass(ConfigError, PacelineError)


def test_file_values_arrive_typed(write):
    config = load_config(
        write("seed: 7\nrl: {lr: 5e-4, steps: 3}\npolicy: {lora: {r: 8, targets: [q_proj]}}\ntasks:\n  text_to_sql:\n")
    )
    assert config.seed == 7
    assert config.rl.lr == 5e-4
    assert config.rl.steps == 3
    assert config.policy.lora == LoraConfig(r=8, targets=("q_proj",))
    assert config.tasks == {"text_to_sql": TaskConfig()}


def test_a_section_without_keys_keeps_its_defaults(write):
    assert load_config(write("rl:\n  # lr: 1e-3\nseed: 1\n")) == Config(seed=1)


# Unknown keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rl:\n  group_sise: 4\n", "run.yaml:2: unknown key rl.group_sise; did you mean rl.group_size?"),
        ("seed: 1\n\nlr: 1\n", "run.yaml:3: unknown key lr; did you mean rl.lr?"),
        ("polcy: {}\n", "run.yaml:1: unknown key polcy; did you mean policy?"),
        ("rl: {temperature: 1}\n", "run.yaml:1: unknown key rl.temperature; did you mean sampling.temperature?"),
        ("tasks:\n  mine:\n    kindd: x\n", "run.yaml:3: unknown key tasks.mine.kindd; did you mean tasks.mine.kind?"),
        ("policy:\n  lora:\n    rank: 4\n", "run.yaml:3: unknown key policy.lora.rank; known in policy.lora: r, alpha"),
        ("zzzz: 1\n", "run.yaml:1: unknown key zzzz; known sections and keys: seed, out"),
        ("on: 1\n", "run.yaml:1: unknown key on"),
        ("7: 1\n", "run.yaml:1: unknown key 7"),
    ],
)
def test_an_unknown_key_is_named_with_its_line_and_the_nearest_known_key(write, text, message):
    assert message in refusal(write(text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.stepz=4", "the override rl.stepz=4: unknown key rl.stepz; did you mean rl.steps?"),
        ("drafer.kind=none", "the override drafer.kind=none: unknown key drafer; did you mean drafter?"),
        ("policy.lora.rr=4", "the override policy.lora.rr=4: unknown key policy.lora.rr"),
    ],
)
def test_an_unknown_key_of_an_override_names_the_override(write, override, message):
    assert message in refusal(write("seed: 1\n"), override)


# Types


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rl:\n  steps: many\n", "run.yaml:2: rl.steps: must be an integer, got 'many'"),
        ("rl:\n  steps: 1.5\n", "run.yaml:2: rl.steps: must be an integer, got 1.5"),
        ("rl: {steps: true}\n", "run.yaml:1: rl.steps: must be an integer, got True"),
        ("rl: {lr: fast}\n", "run.yaml:1: rl.lr: must be a number, got 'fast'"),
        ('rl: {lr: "5e-4"}\n', "run.yaml:1: rl.lr: must be a number, got '5e-4'"),
        ("policy: {path: 135}\n", "run.yaml:1: policy.path: must be text, got 135; quote it"),
        ("policy: smollm2\n", "run.yaml:1: policy must be a section with keys, got 'smollm2'"),
        ("policy: {lora: [1]}\n", "run.yaml:1: policy.lora must be a section with keys, got [1]"),
        ("tasks: [a]\n", "run.yaml:1: tasks must be a section with keys, got ['a']"),
        ("tasks:\n  a: 0\n", "run.yaml:2: tasks.a must be a section with keys, got 0"),
        (
            "sampling: {stop_token_ids: [1, x]}\n",
            "run.yaml:1: sampling.stop_token_ids: Expected int, got str",
        ),
        ("rl: {lr: }\n", "run.yaml:1: rl.lr: must be a number, got None"),
        ("- 1\n", "run.yaml:1: the file must be a mapping of sections"),
    ],
)
def test_a_wrong_type_is_named_with_its_line(write, text, message):
    assert message in refusal(write(text))


@pytest.mark.parametrize("word", ['"false"', "'true'", "no", "off", "yes", "on", "0", "1"])
def test_only_true_and_false_are_truth_values(write, word):  # field A16: "false" as text passed a guard
    message = refusal(write(f"policy:\n  trust_remote_code: {word}\n"))
    assert "run.yaml:2: policy.trust_remote_code: must be true or false, got" in message


def test_the_text_false_stays_text_where_text_is_wanted(write):
    assert load_config(write('policy: {path: "false"}\n')).policy.path == "false"


@pytest.mark.parametrize(("text", "value"), [("5e-4", 5e-4), ("1.5E-3", 1.5e-3), ("1", 1.0), (".5", 0.5), ("2.", 2.0)])
def test_numbers_are_read_as_people_write_them(text, value):
    assert load_config(None, [f"rl.lr={text}"]).rl.lr == value


@pytest.mark.parametrize("text", ["007", "1_000", "1:30", "0x", "1e", "2024-01-01"])
def test_text_that_only_resembles_a_number_is_no_number(text):
    assert "must be a" in refusal(None, f"rl.lr={text}")


# Values


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "drafter.kind=histroy",
            "must be one of none, prompt_lookup, history, draft_model, forced, ngram, suffix, eagle3, mtp, block, "
            "hybrid; got 'histroy'; did you mean history?",
        ),
        ("policy.dtype=int4", "must be one of float32, float64, bfloat16; got 'int4'"),
        (
            "drafter.kind=false",
            "must be one of none, prompt_lookup, history, draft_model, forced, ngram, suffix, eagle3, mtp, block, "
            "hybrid; got False",
        ),
        ("sampling.logprobs=Raw", "must be one of processed, raw; got 'Raw'; did you mean raw?"),
    ],
)
def test_a_value_outside_an_enumeration_lists_the_valid_ones(override, message):
    assert message in refusal(None, override)


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1",
        "threads=-1",
        "out=''",
        "tasks={}",
        "policy.path=''",
        "policy.adapter=''",
        "policy.device=gpu",
        "policy.lora.r=0",
        "policy.lora.alpha=0",
        "policy.lora.alpha=.inf",
        "policy.lora.layers=-1",
        "policy.lora.targets=[]",
        "tasks.a.kind=a:b:c",
        "tasks.a.kind=''",
        "tasks.a.train_prompts=0",
        "tasks.a.eval_prompts=-1",
        "engine.slots=0",
        "engine.max_batched_tokens=0",
        "engine.max_batched_tokens=31",
        "engine.kv_tokens=-1",
        "engine.context=-1",
        "drafter.budget=-1",
        "drafter.prompt_lookup.min_match=0",
        "drafter.prompt_lookup.max_match=0",
        "drafter.history.window=0",
        "drafter.prompt_lookup.factor=-1",
        "drafter.history.floor=0",
        "drafter.history.prefetch=-1",
        "drafter.history.threads=-2",
        "drafter.history.cap_mib=-1",
        "drafter.history.warm=''",
        "engine.scouts=-1",
        "budget.margin=-0.1",
        "budget.probe_share=0.5",
        "budget.stragglers=-1",
        "rl.steps=-1",
        "rl.epochs=0",
        "rl.prompts_per_step=0",
        "rl.group_size=0",
        "rl.lr=0",
        "rl.lr=.nan",
        "rl.lr=.inf",
        "rl.warmup_steps=-1",
        "rl.weight_decay=-.1",
        "rl.max_grad_norm=0",
        "rl.inner_updates=0",
        "rl.microbatch_tokens=0",
        "rl.clip_low=1.0",
        "rl.clip_low=0",
        "rl.clip_high=0",
        "rl.kl_coef=.nan",
        "rl.overlong_buffer=-1",
        "rl.overlong_penalty=.inf",
        "rl.eval_every=-1",
        "rl.reward_seconds=0",
        "rl.reward_seconds=.inf",
        "check.every=-1",
        "checkpoint.every=-1",
        "checkpoint.keep=0",
        "sampling.temperature=-1",
        "sampling.top_p=0",
        "sampling.repetition_penalty=0",
        "sampling.max_tokens=0",
    ],
)
def test_an_impossible_value_is_refused_and_names_its_key_and_override(override):
    key = override.partition("=")[0]
    message = refusal(None, override)
    assert message.startswith(f"the override {override}: {key}")
    assert "must be" in message


def test_an_impossible_value_of_a_file_names_its_line(write):
    assert "run.yaml:3: rl.lr: -1.0 must be > 0" in refusal(write("seed: 1\nrl:\n  lr: -1\n"))
    assert "run.yaml:2: sampling.top_p=2.0: must be in (0, 1]" in refusal(write("sampling:\n  top_p: 2\n"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.n=4", "sampling.n: 4 must be left out of a run: rl.group_size says"),
        ("sampling.seed=3", "sampling.seed: 3 must be left out of a run: the run's own seed"),
        ("rl.overlong_buffer=200", "rl.overlong_buffer: 200 must be at most sampling.max_tokens (128)"),
        ("drafter.prompt_lookup.min_match=40", "drafter.prompt_lookup.max_match: 3 must be >= min_match"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_in_one_line(override, message):
    assert refusal(None, override).startswith(f"the override {override}: {message}")


def test_several_learners_are_refused_where_they_cannot_train():
    several = ("cluster.kind=ray", "cluster.learner_workers=2")
    assert refusal(None, several[1]).startswith(
        "the override cluster.learner_workers=2: cluster.learner_workers: 2 must be 1 where cluster.kind is local"
    )
    with pytest.raises(ConfigError, match=r"cotrain\.when: 'pays' must be never where several learners train"):
        load_config(None, [*several, "drafter.kind=eagle3"])
    for fine in (["drafter.kind=history"], ["drafter.kind=eagle3", "cotrain.when=never"]):
        assert load_config(None, [*several, *fine]).cluster.learner_workers == 2


@pytest.mark.parametrize("kind", ["block", "hybrid"])
def test_what_vllm_cannot_draft_with_is_refused_before_it_starts(kind):
    message = refusal(None, "engine.kind=vllm", f"drafter.kind={kind}")
    assert f"drafter.kind: '{kind}' must be eagle3, mtp or history where engine.kind is vllm, or set hf" in message


@pytest.mark.parametrize("key", ["drafter.head.width", "drafter.draft_model.width"])
def test_trees_are_refused_where_the_engine_verifies_chains_only(key):
    assert f"{key}: 4 must be 1 where engine.kind is vllm" in refusal(None, "engine.kind=vllm", f"{key}=4")


# Bad files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nrl: {lr: 1}\nseed: 2\n", "run.yaml:3: seed was set already in line 1; keep one of the two"),
        ("rl:\n  lr: 1\n  lr: 2\n", "run.yaml:3: rl.lr was set already in line 2"),
        ("tasks:\n  a:\n    options: {x: [{y: 1, y: 2}]}\n", "run.yaml:3: tasks.a.options.x.y was set already"),
        ("rl: [1\n", "run.yaml:2: not valid YAML:"),
        ("rl:\n\tlr: 1\n", "run.yaml:2: not valid YAML:"),
        ("a: *b\n", "run.yaml:1: not valid YAML:"),
        ("a: 1\n---\nb: 1\n", "run.yaml:2: not valid YAML:"),
        ("out: !!python/object:os.system x\n", "run.yaml:1: not valid YAML:"),
        ("seed: !!int abc\n", "run.yaml:1: not valid YAML:"),
        ("? [a, b]\n: 1\n", "run.yaml:1: not valid YAML:"),
        ("out: \x07\n", "run.yaml:1: not valid YAML:"),
        ("tasks: {a: {options: &o {self: *o}}}\n", "run.yaml:1: an alias points at what contains it"),
        ("out: " + "[" * 5000, "run.yaml:1: not valid YAML: nested too deeply"),
    ],
)
def test_a_broken_file_is_refused_with_the_line(write, text, message):
    assert message in refusal(write(text))


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path):
    assert "absent.yaml: cannot be read: No such file or directory" in refusal(tmp_path / "absent.yaml")
    assert "cannot be read: it is a folder" in refusal(tmp_path)
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "model.bin: not a text file in UTF-8" in refusal(binary)


def test_an_empty_file_gives_the_defaults(write):
    assert load_config(write("")) == Config()
    assert load_config(write("# nothing\n")) == Config()


def test_an_anchor_that_is_merged_is_no_duplicate(write):
    config = load_config(
        write("tasks:\n  a: &a {train_prompts: 3, kind: text_to_sql}\n  b: {<<: *a, train_prompts: 4}\n")
    )
    assert config.tasks["b"] == TaskConfig(kind="text_to_sql", train_prompts=4)


# Overrides


def test_an_override_beats_the_file_and_a_later_one_beats_an_earlier_one(write):
    path = write("rl: {steps: 1, lr: 1e-3}\n")
    config = load_config(path, ["rl.steps=2", "rl.steps=3"])
    assert (config.rl.steps, config.rl.lr) == (3, 1e-3)


def test_an_override_reaches_a_section_that_the_file_leaves_out():
    config = load_config(None, ["policy.lora.r=4", "drafter.kind=none", "tasks.sql.kind=text_to_sql"])
    assert config.policy.lora == LoraConfig(r=4)
    assert config.drafter.kind == "none"
    assert config.tasks == {"sql": TaskConfig(kind="text_to_sql")}


def test_an_override_may_hold_a_list_a_mapping_null_or_an_equals_sign():
    config = load_config(
        None, ["sampling.stop=['a=b', \"\\n\"]", "sampling.logit_bias={3: -1.5}", "policy.lora=null", "policy.path=a=b"]
    )
    assert config.sampling.stop == ("a=b", "\n")
    assert config.sampling.logit_bias == {3: -1.5}
    assert config.policy.lora is None
    assert config.policy.path == "a=b"


def test_an_override_of_a_whole_section_replaces_it_and_owns_its_keys(write):
    path = write("rl:\n  lr: -1\n  steps: 3\n")
    assert load_config(path, ["rl={lr: 1}"]).rl.steps == 0
    assert refusal(path, "rl={lr: 1, steps: -3}").startswith("the override rl={lr: 1, steps: -3}: rl.steps")


@pytest.mark.parametrize("override", ["rl.steps", "=4", "rl.=4", ".rl=4", "rl..steps=4", "--lr"])
def test_a_malformed_override_says_how_to_write_one(override):
    assert refusal(None, override) == f"override {override!r}: write it as section.key=value"


def test_an_override_below_a_value_is_refused(write):
    message = refusal(write("seed: 1\npolicy: smollm2\n"), "policy.path=x")
    assert message.startswith("the override policy.path=x: policy is 'smollm2' (")
    assert "run.yaml:2), not a section" in message


def test_an_override_that_is_no_yaml_is_refused():
    assert refusal(None, "out=[1").startswith("the override out=[1: not valid YAML")


def test_what_a_grammar_needs_is_asked_for():
    assert refusal(None, "sampling.grammar.kind=regex").endswith("sampling.grammar.text is missing")


# The effective configuration


FULL = Config(
    seed=2**63,
    out="runs/é",
    policy=msgspec.convert({"path": "1e-3", "lora": {"r": 4}, "chat": False}, type(Config().policy)),
    tasks={"a": TaskConfig(kind="my.mod:Task", options={"x": "no", "y": "1e5", "z": [1, None, 2.5e-7], "w": "0x1f"})},
    sampling=SamplingParams(
        temperature=0.7,
        logit_bias={5: -2.0},
        bad_words=((1, 2), (3,)),
        allowed_token_ids=(1, 2),
        stop=("\n", "a: b"),
        grammar=Grammar(kind="json_schema", text='{"type": "string"}', trigger=(4, 5)),
    ),
)


@pytest.mark.parametrize("config", [Config(), FULL], ids=["defaults", "everything"])
def test_the_dumped_configuration_reads_back_equal(write, config):
    assert load_config(write(dump_config(config))) == config


def test_dumped_text_stays_text_for_readers_of_yaml_1_1():
    assert yaml.safe_load(dump_config(FULL))["tasks"]["a"]["options"]["x"] == "no"


def test_every_known_key_but_the_refused_ones_is_in_the_dump():
    optional = {"policy": {"lora": {}}, "sampling": {"grammar": {"kind": "regex", "text": "a"}}}
    dumped = yaml.safe_load(dump_config(msgspec.convert(optional, Config)))
    dumped["tasks"] = {"*": dumped["tasks"]["function_call"]}

    def dotted(tree, prefix=""):
        for key, value in tree.items():
            yield prefix + key
            if isinstance(value, dict):
                yield from dotted(value, f"{prefix}{key}.")

    expected = set(known_keys()) - {"sampling.n", "sampling.seed"}
    assert {key for key in dotted(dumped) if key != "tasks.*"} == expected
