"""TLS of a connection: checks its files before anything is sent, and explains why a server or client was refused."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..errors import SettingError

#: Options of a URL that name files -> the settings they are made of.
FILES: Final = {
    "ssl_ca_certs": "STREAMADV_TLS_CA_FILE",
    "ssl_certfile": "STREAMADV_TLS_CERT_FILE",
    "ssl_keyfile": "STREAMADV_TLS_KEY_FILE",
}
PROBE_SECONDS: Final = 2.0

_REMEDIES: Final = (
    ("ip address mismatch", "connect by a name or address that its certificate has"),
    ("hostname mismatch", "connect by a name or address that its certificate has"),
    ("certificate_verify_failed", "give the CA that signed its certificate (STREAMADV_TLS_CA_FILE)"),
    (
        "certificate_required",
        "it wants a client certificate (STREAMADV_TLS_CERT_FILE and STREAMADV_TLS_KEY_FILE)",
    ),
    ("handshake_failure", "it may want a client certificate (STREAMADV_TLS_CERT_FILE)"),
    ("wrong_version_number", "there is no TLS at this port, write redis://"),
    ("alert", "it does not accept this client's certificate (STREAMADV_TLS_CERT_FILE)"),
)


def check_files(options: Mapping[str, Any]) -> None:
    """Whether the files named in the options of a connection hold certificates and the key that fits.

    Raises SettingError naming option, setting and file.
    """
    name = ""
    try:
        context = ssl.create_default_context()
        if options.get("ssl_ca_certs"):
            name = "ssl_ca_certs"
            context.load_verify_locations(options[name])
        if options.get("ssl_certfile"):
            name = "ssl_certfile"
            # With a password OpenSSL does not ask for one at the terminal.
            password = options.get("ssl_password") or ""
            context.load_cert_chain(options[name], options.get("ssl_keyfile"), password)
    except OSError as error:
        files = f"{name} ({FILES[name]}) {options[name]!r}"
        if name == "ssl_certfile":
            files += f" with ssl_keyfile ({FILES['ssl_keyfile']}) {options.get('ssl_keyfile')!r}"
        said = error.strerror if not isinstance(error, ssl.SSLError) else error.reason or "part is missing"
        raise SettingError(f"{files}: {said}, give readable PEM files, a certificate with its key") from None
    if options.get("ssl_keyfile") and not options.get("ssl_certfile"):
        raise SettingError(
            f"ssl_keyfile ({FILES['ssl_keyfile']}) is given without its certificate: give ssl_certfile "
            f"({FILES['ssl_certfile']}) too"
        )


def refusal(error: BaseException, options: Mapping[str, Any]) -> str | None:
    """Why TLS failed, with the remedy, if trying again cannot help; None for any other error.

    A client that writes first may see a closed connection instead of the server's reason. A client that only listens
    then asks for it.
    """
    tls_error = next((cause for cause in causes(error) if isinstance(cause, ssl.SSLError)), None)
    if tls_error is None:
        return None
    if isinstance(tls_error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)) or not tls_error.reason:
        tls_error = _ask(options)
        if tls_error is None or not tls_error.reason:
            return None
    text = str(tls_error).lower()
    remedy = next((remedy for mark, remedy in _REMEDIES if mark in text), None)
    return None if remedy is None else f"{tls_error.reason.lower().replace('_', ' ')}: {remedy}"


def _ask(options: Mapping[str, Any]) -> ssl.SSLError | None:
    """The error that a server sends to a client that connects and writes nothing; None if it sends none."""
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # this client sends no secret
    if options.get("ssl_certfile"):
        password = options.get("ssl_password") or ""
        context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"), password)
    host = options.get("host", "localhost")
    try:
        with (
            socket.create_connection((host, options.get("port", 6379)), PROBE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as wrapped,
        ):
            wrapped.recv(1)
    except ssl.SSLError as error:
        return error
    except OSError:
        pass
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes, nearest first: a cluster's client wraps the errors of its nodes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
