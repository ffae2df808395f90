"""Trackers are told the same numbers under the same names, once a step, and none of them can end a run."""

import math
import socket
import sqlite3
import struct
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest

from paceline.config import TRACKERS, ConfigError, PrometheusConfig, TrackConfig, load_config
from paceline.report.definitions import METRICS
from paceline.report.trackers import TrackerError, Trackers, check_trackers, numbers
from paceline.report.trackers.base import charted, parameters
from sample_run import make_record

TELLING = {
    "seconds": {"generation": 8.0, "train": 12.0},
    "eval_reward": math.nan,
    "acceptance": math.nan,
    "accept_lengths": [3, 1],
    "identity": "identical",
    "lossy": ["engine.verifier"],
    "draft_trained": True,
    "events": {"tracker_lost": 2},
}


def steps(count: int, **changes):
    return [make_record(step, tokens=1920 + step, **(TELLING | changes)) for step in range(count)]


def tracked(tmp_path: Path, *overrides: str, records=(), lost=None, close=True) -> Trackers:
    """Open the trackers of a run in ``tmp_path``, tell them the records, and end the run."""
    config = load_config(None, [f"out={tmp_path}", "track.name=tiny", *overrides])
    found = [] if lost is None else lost
    trackers = Trackers(config, tmp_path, tmp_path / "trackers.json", lambda *event: found.append(event))
    trackers.open()
    for record in records:
        trackers.record(record)
    if close:
        trackers.close()
    return trackers


def killed_after(tmp_path: Path, *overrides: str, told: int, remembered: int) -> None:
    """A run whose trackers have ``told`` steps, of which the state knows ``remembered``, goes on to step 5."""
    tracked(tmp_path, *overrides, records=steps(told))
    state = msgspec.json.decode((tmp_path / "trackers.json").read_bytes())
    (tracker,) = state
    state[tracker]["told"] = remembered - 1
    (tmp_path / "trackers.json").write_bytes(msgspec.json.encode(state))
    config = load_config(None, [f"out={tmp_path}", "track.name=tiny", *overrides])
    trackers = Trackers(config, tmp_path, tmp_path / "trackers.json", lambda *_: pytest.fail("a tracker is lost"))
    trackers.open(steps(remembered))
    for record in steps(5)[remembered:]:
        trackers.record(record)
    trackers.close()


# What is told


def test_every_number_has_the_name_of_its_definition_and_text_is_a_number_under_itself():
    told = list(numbers(make_record(0, **TELLING)))
    assert {name for name, _, _ in told} <= {metric.name for metric in METRICS}
    assert ("seconds", "train", 12.0) in told
    assert ("accept_lengths", "0", 3.0) in told
    assert ("identity", "identical", 1.0) in told
    assert ("lossy", "engine.verifier", 1.0) in told
    assert ("draft_trained", "", 1.0) in told
    assert not any(name == "drafter_version" for name, _, _ in told), "null is no number"


def test_what_is_not_known_is_left_out_of_a_history_and_never_0():
    chart = charted(make_record(0, **TELLING))
    assert chart["seconds/train"] == 12.0
    assert chart.keys().isdisjoint({"acceptance", "eval_reward", "draft_loss"})


def test_parameters_are_settings_and_versions_without_those_of_trackers():
    known = parameters(load_config(None, ["seed=3", "track.mlflow.uri='http://me:secret@host'"]))
    assert known["seed"] == 3
    assert known["rl.group_size"] == 8
    assert known["versions.torch"]
    assert "secret" not in str(known)


# What is refused


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("track.to=[tensorbord]", "track.to: 'tensorbord' is no tracker; did you mean tensorboard?"),
        ("track.to=[wandb, wandb]", "track.to: ['wandb', 'wandb'] must be names without repetition"),
        ("track.prometheus.port=70000", "track.prometheus.port: 70000 must be from 0 to 65535"),
        ("track.project=' '", "track.project: ' ' must be a name"),
    ],
)
def test_a_tracker_that_is_not_known_is_refused_in_one_line(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert message in str(caught.value)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_package_that_is_missing_is_named_before_anything_is_written(name, tmp_path, monkeypatch):
    from paceline.rl.loop import train

    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(TrackerError, match=rf"^track.to: {name} is not installed; pip install \S+$"):
        train(load_config(None, [f"out={tmp_path / 'run'}", f"track.to=[{name}]", f"policy.path={tmp_path}"]))
    assert not (tmp_path / "run").exists()


def test_a_page_that_others_can_reach_takes_a_token(monkeypatch):
    pytest.importorskip("prometheus_client")
    track = TrackConfig(to=("prometheus",), prometheus=PrometheusConfig(host="0.0.0.0"))
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    with pytest.raises(TrackerError, match=r"track.prometheus.host: others can reach 0.0.0.0; set PACELINE_TOKEN"):
        check_trackers(track)
    monkeypatch.setenv("PACELINE_TOKEN", "s3cret")
    check_trackers(track)


def test_a_state_that_cannot_be_read_is_refused_in_one_line(tmp_path):
    (tmp_path / "trackers.json").write_text("{")
    with pytest.raises(TrackerError, match=r"trackers.json: cannot be read: .*; remove it to track a new run"):
        tracked(tmp_path, "track.to=[prometheus]")


# TensorBoard


def scalars(tmp_path: Path):
    """Tag -> {step: [values]}, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    found = {}
    for tag in read.Tags()["scalars"]:
        for event in read.Scalars(tag):
            found.setdefault(tag, {}).setdefault(event.step, []).append(event.value)
    return found, read


def test_tensorboard_reads_back_what_it_was_told(tmp_path):
    pytest.importorskip("tensorboard")
    tracked(tmp_path, "track.to=[tensorboard]", records=steps(3))
    found, read = scalars(tmp_path)
    assert found["tokens"] == {0: [1920.0], 1: [1921.0], 2: [1922.0]}
    assert found["seconds/train"] == {0: [12.0], 1: [12.0], 2: [12.0]}
    assert found["events/tracker_lost"][1] == [2.0]
    assert "acceptance" not in found
    assert "_hparams_/session_start_info" in read.summary_metadata
    hparams = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"versions.torch" in hparams


def test_tensorboard_goes_on_without_a_doubled_step(tmp_path):
    pytest.importorskip("tensorboard")
    killed_after(tmp_path, "track.to=[tensorboard]", told=4, remembered=2)
    assert scalars(tmp_path)[0]["tokens"] == {step: [1920.0 + step] for step in range(5)}


def test_a_new_run_in_the_folder_does_not_mix_with_the_event_files_of_the_old_one(tmp_path):
    pytest.importorskip("tensorboard")
    tracked(tmp_path, "track.to=[tensorboard]", records=steps(4))
    (tmp_path / "trackers.json").unlink()  # what an overwritten run does
    tracked(tmp_path, "track.to=[tensorboard]", records=steps(2))
    assert sorted(scalars(tmp_path)[0]["tokens"]) == [0, 1]


# Weights & Biases


def wandb_records(file: Path):
    """The records of an offline run: a log of blocks of 32 KiB, each piece with checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, held = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = -at % 32768
        if 0 < left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(held)
            yield record
            held = b""


def finished_records(file: Path):
    """The records of a run that has ended; its service writes the last of them soon after."""
    for _ in range(100):
        records = list(wandb_records(file))
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.1)
    return pytest.fail(f"{file} has no end")


def test_weights_and_biases_writes_offline_and_goes_on_under_the_same_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    killed_after(tmp_path, "track.to=[wandb]", told=2, remembered=2)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert files[0].name == files[1].name, "one id"
    history, settings, project = {}, {}, set()
    for file in files:
        for record in finished_records(file):
            if record.HasField("run"):
                project.add(record.run.project)
                settings |= {item.key: item.value_json for item in record.run.config.update}
            if record.HasField("history"):
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                history.setdefault(record.history.step.num, []).append(row)
    assert {step: [float(row["tokens"]) for row in rows] for step, rows in history.items()} == {
        step: [1920.0 + step] for step in range(5)
    }
    assert float(history[0][0]["seconds/train"]) == 12.0
    assert "acceptance" not in history[0][0]
    assert project == {"paceline"}
    assert settings["rl.group_size"] == "8"


# Trackio


def test_trackio_has_each_step_once_in_its_own_database(tmp_path, monkeypatch):
    utils = pytest.importorskip("trackio.utils", reason="trackio is not installed")
    storage = pytest.importorskip("trackio.sqlite_storage")
    for module in (utils, storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    killed_after(tmp_path, "track.to=[trackio]", told=4, remembered=2)
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, run_name, metrics from metrics order by step").fetchall()
    assert [step for step, _, _ in rows] == [0, 1, 2, 3, 4]
    assert len({name for _, name, _ in rows}) == 1
    told = msgspec.json.decode(rows[3][2])
    assert told["tokens"] == 1923.0
    assert told["seconds/train"] == 12.0
    assert "acceptance" not in told


# MLflow


def mlflow_history(uri: str, tmp_path: Path):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    state = msgspec.json.decode((tmp_path / "trackers.json").read_bytes())
    run = client.get_run(state["mlflow"]["id"])
    return run, {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}


@pytest.mark.parametrize("store", ["files", pytest.param("database", marks=pytest.mark.slow)])
def test_mlflow_has_each_step_once_in_its_store(store, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    options = ["track.to=[mlflow]"]
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    if store == "files":
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = (tmp_path / "mlruns").as_uri()
        options.append(f"track.mlflow.uri={uri}")
    else:
        pytest.importorskip("sqlalchemy")
    killed_after(tmp_path, *options, told=4, remembered=2)
    run, history = mlflow_history(uri, tmp_path)
    assert [(metric.step, metric.value) for metric in history["tokens"]] == [(step, 1920.0 + step) for step in range(5)]
    assert history["seconds/train"][0].value == 12.0
    assert "acceptance" not in history
    assert run.data.params["rl.group_size"] == "8"
    assert (run.info.run_name, run.info.status) == ("tiny", "FINISHED")


# Prometheus


def url(trackers: Trackers) -> str:
    return trackers._open["prometheus"].url


def page(address: str, token: str | None = None) -> str:
    request = urllib.request.Request(address)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def test_prometheus_reads_the_last_step_as_gauges_and_events_as_counters(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    trackers = tracked(tmp_path, "track.to=[prometheus]", "track.prometheus.port=0", records=steps(3), close=False)
    text = page(url(trackers))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["paceline_step",] == 2
    assert found["paceline_tokens",] == 1922
    assert found["paceline_seconds", "train"] == 12.0
    assert math.isnan(found["paceline_acceptance",]), "never verified is not 0"
    assert found["paceline_identity", "identical"] == 1
    assert found["paceline_events_total", "tracker_lost"] == 6, "two a step"
    assert "# HELP paceline_tokens Tokens emitted in the step's rollouts, stop tokens included." in text
    trackers.close()


def test_the_page_is_for_those_who_send_the_token_and_ends_with_the_run(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("PACELINE_TOKEN", "s3cret")
    trackers = tracked(tmp_path, "track.to=[prometheus]", "track.prometheus.port=0", records=steps(1), close=False)
    held, address = trackers._open["prometheus"], url(trackers)
    for token in (None, "wrong"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            page(address, token)
    assert "paceline_tokens 1920.0" in page(address, "s3cret")
    trackers.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        page(address, "s3cret")
    assert held.url == address, "it is still held, so the port was not freed by chance"
    port = address.rsplit(":", 1)[1].removesuffix("/metrics")
    tracked(tmp_path, "track.to=[prometheus]", f"track.prometheus.port={port}")


def test_a_port_that_is_taken_is_refused_in_one_line(tmp_path):
    pytest.importorskip("prometheus_client")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(TrackerError, match=rf"^track.prometheus: 127.0.0.1:{port}: .*; choose another port$"):
            tracked(tmp_path, "track.to=[prometheus]", f"track.prometheus.port={port}")


def test_a_resumed_run_counts_the_events_of_its_earlier_steps(tmp_path):
    pytest.importorskip("prometheus_client")
    config = load_config(None, [f"out={tmp_path}", "track.to=[prometheus]", "track.prometheus.port=0"])
    trackers = Trackers(config, tmp_path, tmp_path / "trackers.json", lambda *_: None)
    trackers.open(steps(3))
    trackers.record(steps(4)[3])
    text = page(url(trackers))
    trackers.close()
    assert 'paceline_events_total{event="tracker_lost"} 8.0' in text


# Faults


def test_a_tracker_that_fails_is_lost_once_and_the_others_go_on(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client")
    pytest.importorskip("tensorboard")
    lost = []
    trackers = tracked(
        tmp_path, "track.to=[prometheus, tensorboard]", "track.prometheus.port=0", lost=lost, close=False
    )
    log = type(trackers._open["prometheus"]).log

    def full(self, record):
        if record.step >= 1:
            raise OSError(28, "No space left\non device")
        log(self, record)

    monkeypatch.setattr(type(trackers._open["prometheus"]), "log", full)
    for record in steps(4):
        trackers.record(record)
    trackers.close()
    assert lost == [
        ("tracker_lost", "prometheus: OSError: [Errno 28] No space left on device; training goes on without it")
    ]
    assert sorted(scalars(tmp_path)[0]["tokens"]) == [0, 1, 2, 3]


def test_a_tracker_that_cannot_be_opened_ends_the_run_before_its_first_step_in_one_line(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file where a folder is wanted")
    with pytest.raises(TrackerError, match=r"^track.to: tensorboard cannot be opened: \S+Error: .*$"):
        tracked(tmp_path, "track.to=[tensorboard]")


def test_a_run_trains_on_when_its_tracker_breaks_and_the_resumed_run_fills_the_gap(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from paceline.report.trackers.tensorboard import TensorboardTracker
    from paceline.rl.loop import train
    from tiny_run import make_policy, tiny_config

    log = TensorboardTracker.log

    def gone(self, record):
        if record.step == 1:
            raise ConnectionError("gone")
        log(self, record)

    policy = make_policy(tmp_path / "policy")
    options = ("track.to=[tensorboard]", "rl.group_size=2", "check.every=0")
    told = []
    with monkeypatch.context() as patched:
        patched.setattr(TensorboardTracker, "log", gone)
        train(tiny_config(policy, tmp_path / "run", *options, "rl.steps=3"), on_event=told.append)
    assert [text for text in told if str(text).startswith("tracker_lost")] == [
        "tracker_lost: tensorboard: ConnectionError: gone; training goes on without it"
    ]
    records = train(tiny_config(policy, tmp_path / "run", *options, "rl.steps=4"), resume=True)
    assert [record.events.get("tracker_lost", 0) for record in records] == [0, 0, 1, 0]
    found, _ = scalars(tmp_path / "run")
    assert {step: len(values) for step, values in found["tokens"].items()} == {0: 1, 1: 1, 2: 1, 3: 1}
    assert [found["reward"][step][0] for step in range(4)] == pytest.approx([r.reward for r in records])


def connected(address: str, sent: bytes) -> socket.socket:
    host, port = address.removeprefix("http://").removesuffix("/metrics").rsplit(":", 1)
    client = socket.create_connection((host, int(port)), timeout=10)
    client.sendall(sent)
    return client


def is_hung_up(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def scrapes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "paceline-scrape"]


def test_a_client_that_stays_is_hung_up_on_when_the_run_ends(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client")
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    trackers = tracked(tmp_path, "track.to=[prometheus]", "track.prometheus.port=0", records=steps(1), close=False)
    clients = [
        connected(url(trackers), sent) for sent in (b"", b"GET /metrics", b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
    ]
    assert "paceline_tokens" in page(url(trackers)), "others are served meanwhile"
    trackers.close()
    assert all(is_hung_up(client) for client in clients)
    assert scrapes() == []
    for client in clients:
        client.close()


def test_a_client_that_sends_ever_so_slowly_has_no_more_time_than_others(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client")
    from paceline.report.trackers import prometheus

    monkeypatch.setattr(prometheus, "_CLIENT_SECONDS", 0.3)
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    trackers = tracked(tmp_path, "track.to=[prometheus]", "track.prometheus.port=0", records=steps(1), close=False)
    client = connected(url(trackers), b"GET /")
    assert is_hung_up(client)
    assert "paceline_tokens" in page(url(trackers))
    client.close()
    trackers.close()


def test_clients_beyond_the_most_take_no_thread(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client")
    from paceline.report.trackers import prometheus

    monkeypatch.setattr(prometheus, "_MOST_CLIENTS", 3)
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    trackers = tracked(tmp_path, "track.to=[prometheus]", "track.prometheus.port=0", records=steps(1), close=False)
    clients = [connected(url(trackers), b"G") for _ in range(8)]
    assert all(is_hung_up(client) for client in clients[3:])
    assert len(scrapes()) == 3
    trackers.close()
    for client in clients:
        client.close()
