"""Arguments after ``--`` by what vLLM's parser makes of them, however they are spelled."""

import argparse

import pytest

from paceline.integrations.vllm.server_process import MIDDLEWARE, ArgumentError, parsing, read

OURS = ["--model", "m", "--host", "127.0.0.1", "--port", "8000", "--middleware", MIDDLEWARE]
SPECULATIVE = ["--speculative-config", '{"method": "custom_class", "num_speculative_tokens": 16}']
ADDITIONAL = ["--additional-config", '{"paceline": {}}']
YAML = {
    "host": "host: 0.0.0.0",
    "speculative": "speculative-config:\n  method: ngram",
    "speculative_list": "speculative_config: {method: ngram}",
    "middleware": "middleware: [a.b]",
    "api_key": "api-key: [x]",
    "model": "model: other",
    "grpc": "grpc: true",
}


def abbreviating():
    """A parser that abbreviates as argparse does."""
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--host", "--uds", "--dtype", "--ssl-keyfile", "--ssl-certfile"):
        parser.add_argument(flag)
    parser.add_argument("--port", type=int)
    parser.add_argument("--middleware", action="append", default=[])
    parser.add_argument("--allowed-origins", default=[])
    return parsing(parser, argparse.ArgumentParser.parse_args)


def test_abbreviations_are_read_as_the_parser_reads_them():
    for theirs in (["--hos", "0.0.0.0"], ["--ho=0.0.0.0"], ["--por", "1"], ["--ud", "/tmp/s"], ["--mo", "x"]):
        with pytest.raises(ArgumentError, match=r"^--(host|port|uds|model): set here already; use "):
            read(abbreviating(), OURS, theirs, has_token=True)
    with pytest.raises(ArgumentError, match=r"^--middleware: it could answer before the token is seen"):
        read(abbreviating(), OURS, ["--mid", "a.b"], has_token=True)
    found = read(abbreviating(), OURS, ["--dt", "float32"], has_token=True)
    assert (found.dtype, found.host) == ("float32", "127.0.0.1")


def test_what_the_parser_does_not_take_is_one_line():
    for theirs in (["--nothing"], ["--port", "many"], ["--dtype"], ["\x1b[2J"]):
        with pytest.raises(ArgumentError, match=r"^arguments for vLLM: [ -~]+$"):
            read(abbreviating(), OURS, theirs, has_token=True)


def test_half_of_https_is_refused_and_cross_origin_requests_need_no_token():
    for half in ("--ssl-keyfile", "--ssl-certfile"):
        with pytest.raises(ArgumentError, match="HTTPS takes both"):
            read(abbreviating(), OURS, [half, "x.pem"], has_token=True)
    read(abbreviating(), OURS, ["--ssl-k", "k.pem", "--ssl-c", "c.pem"], has_token=True)
    with pytest.raises(ArgumentError, match=r"^--allowed-origins: a browser sends no token"):
        read(abbreviating(), OURS, ["--allowed-o", "*"], has_token=True)
    read(abbreviating(), OURS, ["--allowed-o", "*"], has_token=False)


@pytest.fixture(scope="module")
def of_vllm():
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return parsing(make_arg_parser(FlexibleArgumentParser()), FlexibleArgumentParser.parse_args)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        ("--host 0.0.0.0", "host"),
        ("--host=0.0.0.0", "host"),
        ("--hos 0.0.0.0", "host"),
        ("--port 9", "port"),
        ("--por=9", "port"),
        ("--uds /tmp/socket", "uds"),
        ("--ud=/tmp/socket", "uds"),
        ("--api-key x", "api-key"),
        ("--api_key x", "api-key"),
        ("--api-ke x", "api-key"),
        ("--model other", "model"),
        ("other", "model-tag"),
        ("-sc {}", "speculative-config"),
        ("--speculative-config.method ngram", "speculative-config"),
        ("--speculative_config.method=ngram", "speculative-config"),
        ("--speculative-conf.method ngram", "speculative-config"),
        ('--speculative-c {"method":"ngram"}', "speculative-config"),
        ("--spec-method ngram", "spec-method"),
        ("--spec-me ngram", "spec-method"),
        ("--spec-tokens 3", "spec-tokens"),
        ("--additional-conf {}", None),
        ('--additional-conf {"paceline":{"mend":false}}', "additional-config"),
        ("--additional-config.paceline.mend false", "additional-config"),
        ("--additional_config.x+ 1,2", "additional-config"),
        ("--middleware a.b", "middleware"),
        ("--middlew=a.b", "middleware"),
        ("--headless", "headless"),
        ("--head", "headless"),
        ("--api-server-count 2", "api-server-count"),
        ("-asc 2", "api-server-count"),
        ("--grpc", "grpc"),
        ("--grpc-port 5", "grpc-port"),
        ("--nnodes 2", "nnodes"),
        ("--master-addr 10.0.0.1", "master-addr"),
        ("--data-parallel-address 10.0.0.1", "data-parallel-address"),
        ('--kv-events-config {"enable_kv_cache_events":true,"publisher":"zmq"}', "kv-events-config"),
        ("--kv-events-config.publisher zmq", "kv-events-config"),
        ("--tool-server demo", "tool-server"),
        ("--ssl-cert-reqs 2", "ssl-cert-reqs"),
        ('--allowed-origins ["*"]', "allowed-origins"),
        ("--allow-cred", "allow-credentials"),
    ],
)
def test_vllm_parses_every_spelling_to_a_refusal(of_vllm, theirs, field):
    arguments = theirs.split(" ")
    ours = [*OURS, *SPECULATIVE, *ADDITIONAL]
    expected = "speculative-config|additional-config" if field is None else field
    with pytest.raises(ArgumentError, match=f"^--({expected}): "):
        read(of_vllm, ours, arguments, has_token=True)
    assert of_vllm(ours).host == "127.0.0.1"  # the parser is as it was


@pytest.mark.vllm
@pytest.mark.parametrize("name", YAML)
def test_a_file_of_arguments_is_read_too(of_vllm, tmp_path, name):
    path = tmp_path / "arguments.yaml"
    path.write_text(YAML[name] + "\nmax-model-len: 64\n")
    with pytest.raises(ArgumentError, match=r"^--"):
        read(of_vllm, [*OURS, *SPECULATIVE, *ADDITIONAL], ["--config", str(path)], has_token=True)
    path.write_text("max-model-len: 64\n")
    found = read(of_vllm, [*OURS, *SPECULATIVE, *ADDITIONAL], ["--config", str(path)], has_token=True)
    assert found.max_model_len == 64
    assert found.speculative_config["method"] == "custom_class"
    for broken in ("[", "- a\n", "max-model-len: [a]", "", "\x00"):
        path.write_text(broken)
        with pytest.raises(ArgumentError, match=r"^arguments for vLLM: "):
            read(of_vllm, OURS, ["--config", str(path)], has_token=True)


@pytest.mark.vllm
def test_what_vllm_takes_and_paceline_does_not_decide_goes_through(of_vllm):
    theirs = ["--dtype", "float32", "--max-model-len", "4k", "-tp", "2", "--enforce-eager", "-O1"]
    found = read(of_vllm, [*OURS, *SPECULATIVE, *ADDITIONAL], theirs, has_token=True)
    assert (found.max_model_len, found.tensor_parallel_size, found.dtype) == (4000, 2, "float32")
    assert (found.middleware, found.host, found.port) == ([MIDDLEWARE], "127.0.0.1", 8000)
    for wrong in ("--nothing", "--max-model-len many", "--speculative-config", "-sc {", "--config /nowhere.yaml"):
        with pytest.raises(ArgumentError, match=r"^arguments for vLLM: "):
            read(of_vllm, OURS, wrong.split(), has_token=True)
