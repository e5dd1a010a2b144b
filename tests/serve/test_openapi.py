"""Requests made up from the OpenAPI document: none of them is the server's fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from tests.serve.conftest import Running


def test_the_document_lists_every_field(http: httpx2.Client) -> None:
    document = http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"} <= set(document["paths"])
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "stream", "response_format", "return_trace"} <= set(fields)
    assert all(fields[name].get("description") for name in fields), "what a field does stands in the document"


def attacked(server: Running, folder: Path, *options: str) -> None:
    """Requests that schemathesis makes up; the server is well afterwards."""
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.url}/openapi.json", "--seed", "1"]
    checks = ["--checks", "not_a_server_error"]
    done = subprocess.run([*command, *checks, *options], cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:]
    server.wait_idle()
    assert server.http().get("/health").status_code == 200
    assert "Traceback" not in server.log.read_text()


@pytest.mark.multiprocess
def test_no_request_makes_the_server_fail(shipped: Running, tmp_path: Path) -> None:
    attacked(shipped, tmp_path, "--max-examples", "3", "--phases", "fuzzing")


@pytest.mark.slow
def test_no_request_makes_the_server_fail_at_length(server: Running, tmp_path: Path) -> None:
    attacked(server, tmp_path, "--max-examples", "25", "--phases", "examples,coverage,fuzzing")
