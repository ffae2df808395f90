"""The Triton kernels against the torch code, in Triton's interpreter; on a GPU ``benchmarks/kernels.py`` runs the same.

The interpreter is chosen when Triton is imported, for the whole process, so the checks run in one of their own.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.sampling import kernels

CHECKS = Path(__file__).with_name("kernel_checks.py")


def names_of_checks():
    listed = next(
        node.value
        for node in ast.parse(CHECKS.read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CHECKS"
    )
    return [ast.unparse(name) for name in listed.elts]


@pytest.fixture(scope="module")
def failures():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(CHECKS), "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is a Linux package")
@pytest.mark.parametrize("check", names_of_checks())
def test_kernels_and_torch_code_agree(failures, check):
    assert not failures[check], failures[check]


def test_the_dispatch_leaves_tensors_of_the_cpu_to_torch(monkeypatch):
    on_gpu = type("Logits", (), {"is_cuda": True})()
    monkeypatch.setattr(kernels, "_has_triton", lambda: True)
    assert kernels.serve(on_gpu)
    assert not kernels.serve(torch.zeros(1, 3))
    monkeypatch.setenv("PACELINE_KERNELS", "0")
    assert not kernels.serve(on_gpu)
    monkeypatch.delenv("PACELINE_KERNELS")
    monkeypatch.setattr(kernels, "_has_triton", lambda: False)
    assert not kernels.serve(on_gpu)
