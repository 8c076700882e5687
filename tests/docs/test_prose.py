"""Sentences of README and docs are read once: patterns that made readers stop are found, with what to write instead."""

from __future__ import annotations

import re
from typing import Final

import pytest

from .story import ROOT, pages

#: A pattern, and what to write instead.
PATTERNS: Final[dict[str, str]] = {
    r"\bwhat is no(ne)?\b|\bwho is no(ne)?\b|\bthat is none\b|\bof which none\b": "say what it is, not what it is not",
    r"\bso many\b": "give the number, or name it: `partial_min_usable` rollouts",
    r"\b[Ww]hoever\b": "name the process or the person",
    r"\b[Ll]ikewise\b|\bas of the last\b|\bthe same likewise\b": "repeat the words",
    r"\b(is|are) waited for\b|\b(is|are) heard\b": "say who waits for whom",
    r"\bbefall|\baccompan|\bsettled\b|\bfounded\b": "use the word for the step of the protocol",
    r"(?m)^(Of|Likewise|Thereby|Therein|Whereby)\b": "begin with the subject",
    r"\bof (it|them|these|those|which) (alone|all)\b": "put the noun first",
    r"\bever so\b|\bby itself alone\b|\bthereof\b|\bwherein\b|\bhereby\b": "plain words",
}
#: A sentence with more words than this wants to be two.
LONGEST: Final = 40
#: Words of README and of the pages before the reference, code included.
MOST_WORDS: Final = 36_000
FENCE: Final = re.compile(r"```.*?```", re.DOTALL)
#: Where a sentence of running text ends.
END: Final = re.compile(r"(?<=[.:?!])\s+(?=[A-Z`*(\[])|\n\n|\n(?=[-|#] ?)|\n(?=\d\. )")


def prose(text: str) -> str:
    """The running text of a page: without code, tables and the targets of links."""
    text = re.sub(r"<!--(?s:.*?)-->|^\|.*$", "", FENCE.sub("", text), flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "`x`", text))


def faults(text: str) -> list[str]:
    """What a reader would stop at."""
    plain = prose(text)
    found = [
        f"{match[0]!r}: {remedy}"
        for pattern, remedy in PATTERNS.items()
        for match in re.finditer(pattern, plain)
    ]
    for sentence in END.split(plain):
        if len(words := sentence.split()) > LONGEST:
            found.append(f"{len(words)} words: {' '.join(words[:12])} ...")
    return found


@pytest.mark.parametrize(
    "text",
    [
        "A server that does not answer is waited for.",
        "Whoever hears of a version finds its weights.",
        "It takes what is none of these.",
        "Groups with so many usable members are trained on.",
        " ".join(["word"] * 41) + ".",
        "| a | table |\n\nWhoever reads on stops here.",
    ],
)
def test_what_stops_a_reader_is_found(text: str) -> None:
    assert faults(text)


def test_code_and_tables_are_not_prose() -> None:
    assert faults("```text\nwhoever\n```\n\n| whoever | so many |\n") == []


@pytest.mark.parametrize("page", [*pages(), "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_a_page_reads_at_once(page: str) -> None:
    assert faults((ROOT / page).read_text()) == []


def test_the_docs_can_be_read() -> None:
    before = [page for page in pages() if not page.startswith(("docs/reference/", "deploy/"))]
    words = {page: len((ROOT / page).read_text().split()) for page in before}
    assert sum(words.values()) <= MOST_WORDS, f"the longest: {sorted(words, key=words.get)[-5:]}"
