"""Users of the deployment on a server that restarts: nothing that scripts have written is lost."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamadv.store.connection import Connection
from streamadv.store.embedded import free_port
from tests.support import group_all, join, ledger, problems, producing, push_groups

from .test_acl import PASSWORDS, RUN, printed_rules, server_binaries

REPOSITORY = Path(__file__).parents[2]


def rights_of_default(file: str) -> str:
    """The line for the user `default` that a file of the project gives."""
    found = re.search(
        r"^\W*(?:echo )?\"?(user default off[^\"\n]*)", (REPOSITORY / file).read_text(), re.MULTILINE
    )
    assert found is not None, file
    return found.group(1)


@contextmanager
def running(binary: str, port: int, folder: Path) -> Iterator[None]:
    """A server of these users, killed at the end: whatever it reads at its next start stands in its file."""
    words = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    words += ["--aclfile", str(folder / "users.acl"), "--appendonly", "yes", "--appendfsync", "always"]
    with (folder / "server.log").open("a") as log, subprocess.Popen(words, stdout=log) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("source", ["deploy/secrets.sh", "docs/operate/server.md"])
@pytest.mark.parametrize("name", sorted(server_binaries()))
@pytest.mark.server
def test_a_server_with_these_users_reads_all_of_its_file_back(name: str, source: str, tmp_path: Path) -> None:
    binary = server_binaries()[name]
    if binary is None:
        pytest.skip(f"no {name} server here")
    (tmp_path / "users.acl").write_text(f"{rights_of_default(source)}\n{printed_rules()}")
    port = free_port()
    url = f"redis://streamadv-pipeline:{PASSWORDS['pipeline'].replace(' ', '%20')}@127.0.0.1:{port}"
    with running(binary, port, tmp_path), producing(url, RUN) as producer:
        push_groups(producer, 3)
        run = join(url, RUN)
        group_all(run)
        before = ledger(run)
        run.connection.close()
    with running(binary, port, tmp_path), Connection(url) as connection:
        connection.wait_until_ready()
        run = join(connection, RUN)
        assert ledger(run) == before
        assert problems(run, deep=False) == []
