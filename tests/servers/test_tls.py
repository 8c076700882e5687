"""TLS with certificates made here: a run over it, and who is refused, with the reason and the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import pytest

import streamadv as sa
from streamadv import cli
from streamadv.errors import ServerError, ServerUnreachableError, SettingError
from streamadv.grouping.scorer import Scorer
from streamadv.producer import Producer
from streamadv.store.connection import AsyncConnection, Connection
from streamadv.store.embedded import EmbeddedServer, free_port
from streamadv.trainer.queue import TrainerQueue
from tests.certificates import Authority, Pair
from tests.support import delivered_batch, group_all, join, problems, producing, push_groups


@dataclass(frozen=True)
class Place:
    """A server that speaks TLS only to clients with a certificate of its own CA."""

    address: str
    plain_url: str
    ca: Authority
    stranger: Authority
    client: Pair

    def url(self, ca: Authority | None = None, pair: Pair | None = None, address: str = "") -> str:
        files = {"ssl_ca_certs": ca.file} if ca else {}
        if pair:
            files |= {"ssl_certfile": pair.cert, "ssl_keyfile": pair.key}
        return f"rediss://{address or self.address}/0?{urlencode(files)}"


def options(ca: Authority, pair: Pair) -> dict[str, str]:
    return {
        "tls-cert-file": str(pair.cert),
        "tls-key-file": str(pair.key),
        "tls-ca-cert-file": str(ca.file),
        "tls-auth-clients": "yes",
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("tls")
    ca, stranger = Authority(folder / "ca"), Authority(folder / "stranger", "another CA")
    port = free_port()
    server = EmbeddedServer(extra_options={"tls-port": str(port)} | options(ca, ca.issue("server")))
    try:
        server.start()
    except ServerError as error:
        server.close()
        if "tls" in str(error).lower():
            pytest.skip(f"this server is built without TLS: {error}")
        raise
    with server:
        yield Place(f"127.0.0.1:{port}", server.url, ca, stranger, ca.issue("client"))


def test_a_run_over_tls_with_client_certificates(place: Place, run: str) -> None:
    url = place.url(place.ca, place.client)
    with producing(url, run) as producer:
        push_groups(producer, 2)
        producer.finish()
        joined = join(url, run)
        batch = delivered_batch(TrainerQueue(url, run, batch_groups=2, commit="each_batch"), joined)
        assert len(batch.references) == 4
        assert problems(joined) == []
    joined.connection.close()


async def test_the_asyncio_producer_over_tls(place: Place, run: str) -> None:
    url = place.url(place.ca, place.client)
    async with Producer(url, run) as producer, producer.group(1) as group:
        for rollout in group:
            await rollout.push(input_ids=range(3), response_mask=[0, 1, 1], reward=1.0)
    joined = join(url, run)
    assert group_all(joined) == ["complete"]
    joined.connection.close()


REFUSED: dict[str, tuple[Callable[[Place], str], str]] = {
    "another CA": (lambda p: p.url(p.stranger, p.client), "STREAMADV_TLS_CA_FILE"),
    "no CA": (lambda p: p.url(None, p.client), "STREAMADV_TLS_CA_FILE"),
    "no client certificate": (lambda p: p.url(p.ca), "it wants a client certificate"),
    "a stranger's certificate": (
        lambda p: p.url(p.ca, p.stranger.issue("client")),
        "does not accept this client's certificate",
    ),
    "another name": (
        lambda p: p.url(p.ca, p.client, p.address.replace("127.0.0.1", "localhost")),
        "name or address that its certificate has",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_who_is_refused_learns_why_at_once(place: Place, case: str) -> None:
    make, part = REFUSED[case]
    url = make(place)
    with Connection(url) as connection, pytest.raises(SettingError, match=part) as caught:
        connection.wait_until_ready()
    assert "\n" not in str(caught.value)
    async with AsyncConnection(url) as other:
        with pytest.raises(SettingError, match=part):
            await other.wait_until_ready()


@pytest.mark.parametrize(
    "opened",
    [
        lambda url, run: Producer(url, run).open(),
        lambda url, run: Scorer(url, run, "s"),
        lambda url, run: TrainerQueue(url, run, commit="each_batch").next_batch(timeout=0),
    ],
    ids=["producer", "scorer", "trainer"],
)
def test_no_role_waits_for_ever_when_it_is_refused(
    place: Place, run: str, opened: Callable[[str, str], object]
) -> None:
    with pytest.raises(SettingError, match="client certificate"):
        opened(place.url(place.ca), run)


def test_a_plain_client_gets_no_answer(place: Place) -> None:
    with Connection(f"redis://{place.address}") as connection, pytest.raises(ServerUnreachableError):
        connection.wait_until_ready(0)


@pytest.mark.processes
@pytest.mark.slow
def test_the_command_line_takes_tls_from_the_environment(
    place: Place, run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    join(place.plain_url, run).connection.close()
    monkeypatch.setenv("STREAMADV_REDIS_URL", f"rediss://{place.address}/0")
    monkeypatch.setenv("STREAMADV_TLS_CA_FILE", str(place.ca.file))
    assert cli.main(["status", "--run", run]) == 1
    assert "STREAMADV_TLS_CERT_FILE" in capsys.readouterr().err
    monkeypatch.setenv("STREAMADV_TLS_CERT_FILE", str(place.client.cert))
    monkeypatch.setenv("STREAMADV_TLS_KEY_FILE", str(place.client.key))
    assert cli.main(["status", "--run", run]) == 0
    with producing(sa.redis_url(), run) as producer:
        push_groups(producer, 1)
    done = subprocess.run(
        [sys.executable, "-m", "streamadv", "status", "--check", "--run", run],
        env=os.environ,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_files_are_checked_before_anything_is_sent(place: Place, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("not a certificate")
    other_key = Pair(place.client.cert, place.ca.issue("third").key)
    for url, setting in (
        (place.url(place.ca, Pair(tmp_path / "none", place.client.key)), "STREAMADV_TLS_CERT_FILE"),
        (place.url(place.ca, Pair(junk, junk)), "STREAMADV_TLS_CERT_FILE"),
        (place.url(place.ca, other_key), "STREAMADV_TLS_KEY_FILE"),
        (f"rediss://h?ssl_ca_certs={junk}", "STREAMADV_TLS_CA_FILE"),
        (f"rediss://h?ssl_ca_certs={tmp_path / 'none'}", "STREAMADV_TLS_CA_FILE.*No such file"),
        (f"rediss://h?ssl_keyfile={place.client.key}", "STREAMADV_TLS_KEY_FILE"),
        (f"rediss://h?ssl_certfile={place.client.cert}", "STREAMADV_TLS_KEY_FILE"),
    ):
        with pytest.raises(SettingError, match=setting) as caught:
            Connection(url)
        assert "\n" not in str(caught.value)
