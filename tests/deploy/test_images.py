"""The Dockerfile and the compose file, by their linters. No Docker needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .rendered import ROOT

#: compose-lint: a tag without a digest. Images of services are pinned to a version, those built here have no digest.
ACCEPTED = {"CL-0019"}


@pytest.mark.processes
def test_hadolint_accepts_the_dockerfile() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    check = subprocess.run(
        [hadolint, ROOT / "deploy" / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout


@pytest.mark.processes
def test_compose_lint_accepts_the_services() -> None:
    check = subprocess.run(
        [sys.executable, "-m", "compose_lint", "check", "--format", "json", ROOT / "deploy" / "compose.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stdout
    assert {finding["rule_id"] for finding in json.loads(check.stdout)["findings"]} <= ACCEPTED
