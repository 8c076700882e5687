"""The URL of a server, a cluster, or a master behind Sentinels: checked, and in the form redis-py takes.

Passwords and certificates that it does not have come from the environment or from files, never from the command line,
which everybody on the machine can read.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import redis
import redis.asyncio.cluster
import redis.connection
import redis.exceptions

from .. import doors
from ..errors import SettingError
from ..messages import brief, one_line
from . import tls

CONNECT_TIMEOUT: Final = 5.0
SENTINEL_PORT: Final = 26379

#: Scheme -> the scheme of redis-py, and the kind of server.
SCHEMES: Final = {
    "redis": ("redis", "server"),
    "rediss": ("rediss", "server"),
    "unix": ("unix", "server"),
    "redis+cluster": ("redis", "cluster"),
    "rediss+cluster": ("rediss", "cluster"),
    "redis+sentinel": ("redis", "sentinel"),
    "rediss+sentinel": ("rediss", "sentinel"),
}
# Each client sets these itself, and an option in the URL would win.
RESERVED_OPTIONS: Final = (
    "decode_responses",
    "legacy_responses",
    "protocol",
    "retry_on_error",
    "retry_on_timeout",
    "socket_timeout",
)


def hide_password(url: str) -> str:
    """The URL as it may be shown: passwords replaced by `***`; where no known scheme says what is a user, users too."""
    is_known = url.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))
    user = r"[a-z+]*://[^:]*:" if is_known else ""
    # Up to the last @, which may be one of a password among the options: then on to its end.
    shown = re.sub(rf"^({user})(?:.*password=[^&]*@[^&]*|.*(?=@))", r"\1***", url, flags=re.DOTALL)
    return re.sub(r"((?:^|[?&])(?:ssl_|sentinel_)?password=)[^&]*", r"\1***", shown)


@dataclass(frozen=True)
class Target:
    """What a URL names."""

    url: str  # as redis-py takes it; behind Sentinels with the first host of theirs
    cluster: bool = False
    sentinels: tuple[tuple[str, int], ...] = ()
    sentinel_login: Mapping[str, str] = field(default_factory=dict)  # username, password
    master: str = ""  # what the Sentinels call it

    @property
    def shared_options(self) -> dict[str, Any]:
        """Options of every client."""
        # RESP2 with every version of redis-py, so that replies have one shape. A unix socket takes no TCP options.
        options: dict[str, Any] = {"protocol": 2}
        if not self.url.startswith("unix:"):
            options |= {"socket_connect_timeout": CONNECT_TIMEOUT, "socket_keepalive": True}
        if self.tls and "ssl_cert_reqs" not in self.options:
            options["ssl_check_hostname"] = True  # redis-py 5 would accept any name
        return options

    @property
    def options(self) -> Mapping[str, Any]:
        """Everything in the URL, under redis-py's names."""
        options: dict[str, Any] = redis.connection.parse_url(self.url)  # type: ignore[no-untyped-call]
        return options

    @property
    def url_options(self) -> dict[str, Any]:
        """What the URL holds besides the address: user, password, database, TLS, limits."""
        address = ("host", "port", "connection_class")
        return {name: value for name, value in self.options.items() if name not in address}

    @property
    def sentinel_options(self) -> dict[str, Any]:
        """Options for the Sentinels: their own user and password, the TLS of the URL."""
        tls = {name: value for name, value in self.options.items() if name.startswith("ssl_")}
        timeouts = {"socket_timeout": CONNECT_TIMEOUT}
        return {**tls, **self.sentinel_login, **self.shared_options, "ssl": self.tls, **timeouts}

    @property
    def tls(self) -> bool:
        return self.url.startswith("rediss:")


def parse_url(url: str) -> Target:
    """The target of a URL. Raises SettingError on one line that shows no password."""
    try:
        scheme, _, rest = url.partition("://")
        if scheme not in SCHEMES:
            raise ValueError(f"start it with one of {', '.join(f'{s}://' for s in SCHEMES)}")
        # Checked first, so that no other message can quote a piece of a password as a host, port or option.
        if set("/?#@[]") & set(rest.rpartition("@")[0]):
            raise ValueError("write special characters in user name and password as %xx (@ is %40)")
        plain_scheme, kind = SCHEMES[scheme]
        plain = f"{plain_scheme}://{rest}"
        target = _behind_sentinels(plain) if kind == "sentinel" else Target(plain, kind == "cluster")
        options = target.options
        _check_address(target, options)
        # Makes the object only: an unknown option is an error now and not at the first command.
        shared = target.shared_options | doors.client_options
        redis.ConnectionPool.from_url(target.url, **shared).make_connection()
    except (TypeError, ValueError, redis.exceptions.RedisError) as error:
        shown = one_line(hide_password(url))
        raise SettingError(f"redis URL {shown!r}: {one_line(str(error))}") from None
    if target.tls:
        tls.check_files(options)
    return target


def _check_address(target: Target, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that clients set themselves, a wrong database, or a socket without a path."""
    for name in RESERVED_OPTIONS:
        if name in options:
            raise ValueError(f"{name} is set by streamadv, remove it")
    address = urlsplit(target.url)
    if address.scheme == "unix":
        if "path" not in options:
            raise ValueError("give the socket's path, unix:///path/to/redis.sock")
    elif address.path not in ("", "/") and not address.path[1:].isdigit():
        raise ValueError(f"the database must be a number, not {brief(address.path[1:])}")
    if target.cluster:
        if options.get("db"):
            raise ValueError("a cluster has database 0 only")
        if not hasattr(redis.asyncio.cluster, "TransactionStrategy"):
            raise ValueError(
                f'redis-py {redis.__version__} has no transactions on a cluster, pip install "redis>=7"'
            )


def _behind_sentinels(url: str) -> Target:
    """`//[user:password@]host[:port],host[:port].../name[/database]`. Raises ValueError."""
    scheme, _, rest = url.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    login, at, hosts = authority.rpartition("@")
    # Parse it with one host, because urlsplit may refuse brackets among several.
    parts = urlsplit(f"{scheme}://{login}{at}{hosts.split(',')[0]}{rest.removeprefix(authority)}")
    master, _, database = parts.path.strip("/").partition("/")
    if not master:
        raise ValueError("name the master behind the hosts, //host:26379,host:26379/mymaster")
    sentinels = []
    for host in hosts.split(","):
        address = urlsplit(f"//{host}")
        if not address.hostname:
            raise ValueError("a host of the Sentinels is empty")
        sentinels.append((address.hostname, address.port or SENTINEL_PORT))
    options = parts.query.split("&")
    sentinel_options = [option for option in options if option.startswith("sentinel_")]
    first = parts._replace(
        path=f"/{database}", query="&".join(option for option in options if option not in sentinel_options)
    )
    logins = dict(parse_qsl("&".join(option.removeprefix("sentinel_") for option in sentinel_options)))
    if unknown := logins.keys() - {"username", "password"}:
        raise ValueError(
            f"sentinel_{min(unknown)} is unknown, there are sentinel_username and sentinel_password"
        )
    return Target(first.geturl(), False, tuple(sentinels), logins, unquote(master))


# Passwords and certificates

PREFIX: Final = "STREAMADV_"


def secret_from(name: str, environment: Mapping[str, str]) -> str | None:
    """A secret given as variable STREAMADV_<name>, or in the file that STREAMADV_<name>_FILE names; None if neither.

    Whitespace at the end of a file (editors put a newline there) is no part of it. Raises SettingError when
    both are given, or the file cannot be read or is empty.
    """
    variable, in_file = f"{PREFIX}{name}", f"{PREFIX}{name}_FILE"
    value, path = environment.get(variable), environment.get(in_file)
    if value and path:
        raise SettingError(f"{variable} and {in_file} are both set: keep one")
    if not path:
        return value or None
    try:
        text = Path(path).read_text(encoding="utf-8").rstrip()
    except OSError as error:
        raise SettingError(f"{in_file}={path!r}: {error.strerror}, name a file that can be read") from None
    except UnicodeDecodeError:
        raise SettingError(f"{in_file}={path!r}: is no text in UTF-8") from None
    if not text:
        raise SettingError(f"{in_file}={path!r}: is empty, put the password there")
    return text


def complete_url(url: str, password: str | None, files: Mapping[str, Path | None]) -> str:
    """`url` with the password and the TLS `files` (by the options' names of `tls.FILES`) that it does not have.

    The URL's own values win, so a complete URL stays as it is; so does one with a scheme that nobody knows, for
    `urls.parse_url` to refuse. Raises SettingError for TLS files with a URL without TLS.
    """
    scheme, separator, rest = url.partition("://")
    if scheme not in SCHEMES:
        return url
    end = min((rest.find(mark) for mark in "/?#" if mark in rest), default=len(rest))
    user, _, host = rest[:end].rpartition("@")
    query = rest.partition("?")[2]
    if (
        password is not None
        and ":" not in user
        and not re.search(r"(^|&)password=", query)
        and "@" not in rest[end:]
    ):
        rest = f"{user}:{quote(password, safe='')}@{host}{rest[end:]}"
    missing = {
        name: str(path) for name, path in files.items() if path is not None and f"{name}=" not in query
    }
    if missing and not scheme.startswith("rediss"):
        setting = tls.FILES[next(iter(missing))]
        raise SettingError(f"{setting} is set, but the URL starts with {scheme}://: write rediss:// for TLS")
    if missing:
        rest += f"{'&' if '?' in rest else '?'}{urlencode(missing)}"
    return f"{scheme}{separator}{rest}"


def environment_with(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process that uses this complete `url`, without settings that complete one."""
    hidden = {f"{PREFIX}REDIS_PASSWORD", f"{PREFIX}REDIS_PASSWORD_FILE", *tls.FILES.values()}
    visible = {name: value for name, value in environment.items() if name.upper() not in hidden}
    return visible | {f"{PREFIX}REDIS_URL": url}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_and_port(host: str, port: int) -> str:
    """As a URL has them."""
    return f"{f'[{host}]' if ':' in host else host}:{port}"
