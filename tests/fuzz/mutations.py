"""Broken input: genuine examples, damaged in their bytes or in their structure.

STREAMADV_FUZZ_CASES is the number of cases of all surfaces together (`make fuzz`: 100,000), STREAMADV_FUZZ_SEED
what they are drawn from; a failing case prints its input and is found again under the same seed.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from streamadv.errors import StreamadvError

T = TypeVar("T")

CASES: Final = int(os.environ.get("STREAMADV_FUZZ_CASES", "3000"))
SEED: Final = os.environ.get("STREAMADV_FUZZ_SEED", "0")

#: Share of the cases each surface gets; see `cases`.
SHARES: Final = {
    "payload, bytes": 0.14,
    "payload, structure": 0.10,
    "payload, memory": 0.02,
    "member table": 0.14,
    "member table, memory": 0.01,
    "packets": 0.10,
    "groups log": 0.08,
    "results log": 0.08,
    "a run's streams": 0.002,
    "open groups": 0.005,
    "a producer's rights": 0.002,
    "JSON lines": 0.168,
    "files": 0.02,
    "chats": 0.06,
    "settings": 0.04,
    "chains": 0.04,
}

#: Cases that were run, by surface: printed at the end.
ran: Counter[str] = Counter()

#: Values that stand where others belong.
HOSTILE: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**40, 10**4200),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "0",
        "1e999",
        "nan",
        "\x00",
        "\n",
        "a\nb",
        "\u2028",
        "\ud800",
        "é" * 300,
        "x" * 5000,
        "../../etc",
    ),
    *([], {}, [[]], [None], [[1], [1, 2]], ["a"], [True, 1], [1e999], [2**70, -1], {"": {}}, {"\x00": 1}),
    *([0] * 5000, {str(n): n for n in range(200)}, {"data": [1], "per_token": 1, "dtype": "|O"}),
)

#: Bytes that trip readers of JSON, of text and of numbers.
TOKENS: Final = (
    *(
        b"\x00",
        b"\xff",
        b"\xed\xa0\x80",
        b"\xf0\x9f",
        b"\r\n",
        b"\n",
        b"\\u0000",
        b"\\ud800",
        b'"',
        b"'",
        b"\\",
    ),
    *(b"[" * 300, b"{" * 50, b'{"a":' * 300, b"]", b"}", b",", b":", b"null", b"true", b"NaN", b"-Infinity"),
    *(b"1e999", b"-0", b"9" * 400, b"9" * 5000, b"1" * 20, b"0x10", b"-", b"1_0", b" ", b"\t"),
    *(b'"group_id":"other"', b'"rollout_index":-1', b'"agents":[1]', b'"dtype":"|O8"', b'"group_size":0'),
)


def cases(surface: str) -> range:
    """The numbers of a surface's cases. Counts them as run."""
    number = max(1, round(CASES * SHARES[surface]))
    ran[surface] += number
    return range(number)


def chance_of(surface: str, number: int) -> random.Random:
    """The source of one case: the same for the same seed, whatever ran before."""
    return random.Random(f"{SEED}/{surface}/{number}")


def damaged_bytes(genuine: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, cut, repeated, moved or replaced by something that trips readers, one to four times."""
    data = bytearray(genuine)
    for _ in range(chance.randint(1, 4)):
        start = chance.randint(0, len(data))
        stop = min(len(data), start + chance.choice((0, 1, 1, 2, 8, 64, 1000)))
        match chance.randrange(6):
            case 0:
                data[start:stop] = chance.randbytes(stop - start)
            case 1:
                del data[start:stop]
            case 2:
                data[start:start] = data[start:stop] * chance.choice((1, 2, 50))
            case 3:
                data[start:stop] = chance.choice(TOKENS)
            case 4:
                del data[start:]
            case _:
                other = chance.randint(0, len(data))
                data[other:other] = data[start:stop]
    return bytes(data)


def damaged_value(genuine: Any, chance: random.Random) -> Any:
    """A copy of a JSON-like value with one to three places replaced, removed, renamed, doubled or added."""
    root = [copy.deepcopy(genuine)]
    for _ in range(chance.randint(1, 3)):
        parent, key = chance.choice(list(_places(root)))
        match chance.randrange(6) if parent is not root else 0:
            case 0 | 1:
                parent[key] = hostile(chance)
            case 2:
                del parent[key]
            case 3 if isinstance(parent, dict):
                parent[chance.choice([str(key) + "s", "junk", "", "header", "agent", "\ud800"])] = parent.pop(
                    key
                )
            case 3 | 4:
                value = parent[key]
                parent[key] = [value, value]
            case _:
                parent[key] = nested(chance.choice((5, 40, 100)), chance.random() < 0.5)
    return root[0]


def hostile(chance: random.Random) -> Any:
    """A value that does not belong where it is put; a copy, as callers go on changing it."""
    return copy.deepcopy(chance.choice(HOSTILE))


def nested(depth: int, lists: bool) -> Any:
    """A value inside `depth` lists or objects."""
    value: Any = 0
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value


def as_json(value: Any) -> bytes:
    """JSON as a careless writer makes it: NaN, lone surrogates, endless digits and all."""
    return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) of a value; of long lists the first ones."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:20])
    for key, item in list(items):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def one_line_error(call: Callable[[], T], kinds: type[StreamadvError], shown: object) -> T | None:
    """What `call` gives, or None after an error: one of `kinds`, on one short line without control characters."""
    try:
        return call()
    except kinds as error:
        text = str(error)
        assert text, shown
        assert text.isprintable(), (text, shown)
        assert len(text) < 2000, (len(text), shown)
        return None
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__}: {error!s:.500} from {shown!r:.1500}") from error


def pick(corpus: Sequence[T], chance: random.Random) -> T:
    return corpus[chance.randrange(len(corpus))]
