"""Pages, help, settings and public docstrings are plain American English.

Code is left out: fenced blocks, what stands in backticks, targets of links, and generated tables.
"""

import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from .pages import DOCS, ROOT, hook

# What nobody writes, and what to write. In lower case; each line break is a space.
PHRASES = {
    r"takes (half|an? \w+) of the time": "is 7.2x faster",
    r"in real bytes": "on the wire",
    r"attacks on (it|them) are tests": "the test suite runs known attacks against each of them",
    r"(shown|seen) in full": "reproduced",
    r"another processor ends": "results vary slightly by CPU",
    r"environment it is installed": "to install it elsewhere, run",
    r"(was|were) seen here": "we reproduced",
    r"(app|file|model|project|strategy) that you have\b": "your existing app",
    r"before the others": "first",
    r"what in an? \w+( \w+)? is not": "what differs from …",
    r"goes before\b": "takes precedence over",
    r"by the side of a line": "a linear decision boundary",
    r"the rehearsal\b": "first, rehearse …",
    r"whatever the work": "however little it computes",
    r"(leave|leaves) the processor to": "throttled so that it does not slow the run",
    r"clock decides": "the choice does not depend on timing",
    r"stands? still": "reports zero simulated time",
    r"\bto the last bit": "bit for bit",
    r"same to the bit": "reproducibility",
    r"trying to is": "changing one raises an error that names it",
    r"itself needs nothing": "you are done",
    r"comes? and goe?s?\b": "join and leave",
    r"nobody has to know": "the number is open",
    r"whose name is it": "node identity",
    r"\bwho(so)?ever\b": "anyone who",
    r"fault is not theirs": "the run itself is at fault",
    r"\bliars?\b|\blying\b|(nodes?|parties|party|servers?|who|that) lies?\b": "malicious, dishonest",
    r"\btold from\b": "distinguished from",
    r"\b(is|are) told\b": "receives, sees",
    r"in other company": "a node's result would depend on the others",
    r"workers run into": "limits scaling",
    r"\bbesides?\b": "next to, in addition to",
    r"\bthe rooms\b": "packages",
    r"takes orders": "runs instructions sent by the server",
    r"\bmended\b": "fixed",
    r"pages promise": "guarantee",
    r"\bno longer:? the run|watched no longer": "stopped watching; the run continues",
    r"by messages alone": "on its nodes",
    r"app as it comes\b": "with its defaults",
    r"\bdeals?\b|\bdealt\b": "splits",
    r"gives? a logit": "returns one logit per class",
    r"that matter first|matters? first before": "main settings",
    r"does not work here": "failed",
    r"as often as it may": "has reached the limit",
    r"answers? nothing(?! else)": "rejects every message",
    r"how to go on": "how to resume",
    r"goes on bit": "resumes bit for bit",
    r"\bknows? no method": "contains no method-specific code",
    r"without a look": "ignoring",
    r"(?<!there )\bis no (app|checkpoint|file|folder|list|model|number|run)\b": "is not a …",
    r"each id once": "ids must be unique",
    r"\bthat which\b|(?<!each )(?<!some )(?<!one )(?<!both )\bof which\b": "the X that, or a new sentence",
    r"\b(is|are) to be\b": "must be",
    r"\bin silence\b": "silently",
    r"\bsays? so\b": "with the reason, reports it",
    r"of which no more than": "at most",
}

# Stems of words in -ise that are American too.
_IN_ISE = re.compile(
    r"(?:re|un|pre|)(?:adv|advert|an|ar|bru|circumc|compr|comprom|conc|cru|d|demi|deno|desp|dev|disgu|enterpr|exc|exerc"
    r"|expert|franch|gu|impr|improv|inc|ka|m|merchand|no|parad|po|pra|prec|prem|prom|ra|r|rev|superv"
    r"|surpr|telev|treat|\w*w)"
)
_ISE = re.compile(r"(\w+)is(e|es|ed|ing|er|ers|ation|ations|able)")
_OUR = re.compile(
    r"(?!your|hour|four|tour|pour|sour|flour|contour|detour|glamour|scour|devour)"
    r"(\w{2,})our(s|ed|ing|able|al|ite|ites|less|ful|hood|hoods|ly|)"
)
_RE = re.compile(r"(?!macabre)(\w*[^aeiou\W][aeiou]\w*[bt])re(s?|d)")
_LL = re.compile(
    r"(?!spell|misspell|tell|sell|swell|dwell|smell|shell|quell|yell|fell|compell|expell|propell|repell|excell"
    r"|rebell|intell)(\w*(?:[bdnpvw]el|abel|ignal|qual|otal|rshal|itial|rial))l(ed|ing)"
)
_YSE = re.compile(r"(\w*(?:anal|catal|paral))ys(e|ed|er|ing)")
_SINGLE = {
    "ageing": "aging",
    "amongst": "among",
    "artefact": "artifact",
    "artefacts": "artifacts",
    "burnt": "burned",
    "catalogue": "catalog",
    "centring": "centering",
    "defence": "defense",
    "enrol": "enroll",
    "fulfil": "fulfill",
    "grey": "gray",
    "judgement": "judgment",
    "learnt": "learned",
    "licence": "license",
    "offence": "offense",
    "practise": "practice",
    "pretence": "pretense",
    "programme": "program",
    "programmes": "programs",
    "spelt": "spelled",
    "whilst": "while",
}


def american(word: str) -> str:
    """Return the American spelling of a word in lower case; the word itself if it has no other."""
    word = _SINGLE.get(word, word)
    if (found := _ISE.fullmatch(word)) and not _IN_ISE.fullmatch(found[1]):
        return f"{found[1]}iz{found[2]}"
    if found := _OUR.fullmatch(word):
        return f"{found[1]}or{found[2]}"
    if found := _RE.fullmatch(word):
        return f"{found[1]}er{found[2].replace('d', 'ed')}"
    if found := _YSE.fullmatch(word):
        return f"{found[1]}yz{found[2]}"
    found = _LL.fullmatch(word)
    return found[1] + found[2] if found else word


def prose(text: str) -> str:
    """Return a page without its code, its links' targets and its generated tables."""
    for pattern in (
        r"^( *)(```+|~~~+).*?^\1\2 *$",
        r"^<!-- (?:results|table).*?^<!-- end of .*? -->$",
        r"<!--.*?-->",
        r"``.*?``|`[^`\n]*`",
        r"(?<=\])\([^)]*\)",
        r"https?://\S+",
    ):
        text = re.sub(pattern, "", text, flags=re.MULTILINE | re.DOTALL)
    return text


def faults(text: str) -> list[str]:
    """Return what to change in a text, each with the better wording."""
    plain = re.sub(r"\s+", " ", prose(text))
    found = [
        f"…{plain[max(0, match.start() - 20) : match.end() + 20]}…: {better}"
        for phrase, better in PHRASES.items()
        for match in re.finditer(phrase, plain, re.IGNORECASE)
    ]
    words = {word.lower() for word in re.findall(r"\b[A-Z]?[a-z]+\b", plain)}
    return found + [f"{word}: {american(word)}" for word in sorted(words) if american(word) != word]


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    # A program writes benchmarks.md.
    *sorted({*DOCS.rglob("*.md")} - {DOCS / "benchmarks.md"}),
    *sorted(DOCS.rglob("*.ipynb")),
    *sorted((ROOT / "flower_apps").glob("*/*.md")),
]
PACKAGES = ("clients", "sim", "strategies", "tasks", "wire")


@cache
def docstrings(package: str) -> dict[str, str]:
    """Return the docstrings of a package's public names and of their methods."""

    def of(name: str, value: object) -> Iterator[tuple[str, str]]:
        ours = str(getattr(value, "__module__", "hedgerow")).startswith("hedgerow")
        if ours and (inspect.isclass(value) or inspect.isfunction(value) or isinstance(value, property)):
            # Names and types of parameters are code.
            lines = (value.__doc__ or "").splitlines()
            yield name, "\n".join(re.sub(r"^\s*[\w, *]+ : .*", "", line) for line in lines)
            for key, inner in vars(value).items() if inspect.isclass(value) else ():
                if not key.startswith("_"):
                    yield from of(f"{name}.{key}", getattr(inner, "__func__", inner))

    module = import_module(f"hedgerow.{package}")
    return {key: text for name in module.__all__ for key, text in of(name, getattr(module, name))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_plain_american_english(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell) for cell in cells)
    assert faults(text) == []


@pytest.mark.parametrize("app", sorted(path.parent.name for path in ROOT.glob("flower_apps/*/README.md")))
def test_settings_are_described_in_plain_american_english(app: str) -> None:
    assert faults(hook().settings(app)) == []


def test_the_command_lines_help_is_plain_american_english() -> None:
    assert faults(hook().commands()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_docstrings_are_plain_american_english(package: str) -> None:
    found = {name: faults(text) for name, text in docstrings(package).items()}
    assert {name: some for name, some in found.items() if some} == {}
    assert len(found) > 20


@pytest.mark.parametrize(
    ("british", "expected"),
    [
        ("behaviours", "behaviors"),
        ("neighbourhood", "neighborhood"),
        ("optimiser", "optimizer"),
        ("serialisation", "serialization"),
        ("centred", "centered"),
        ("metres", "meters"),
        ("modelling", "modeling"),
        ("labelled", "labeled"),
        ("travelled", "traveled"),
        ("analyse", "analyze"),
        ("signalled", "signaled"),
    ],
)
def test_a_british_spelling_is_found(british: str, expected: str) -> None:
    assert faults(f"The {british}.") == [f"{british}: {expected}"]
    assert faults(f"The key `{british}`.") == []


def test_american_words_are_left_as_they_are() -> None:
    words = (
        "otherwise precise noise denoised promised raised arising exercise entrywise revised contour your "
        "hours source resource tour spelled telling expelled called installed recalled analysis basis genre "
        "are where retrieve acres visited disable enabled premises surprising paradise wiser course fourth"
    )
    assert faults(words) == []


def test_a_phrase_is_found_over_a_line_break() -> None:
    (fault,) = faults("A run repeats to the\nlast bit.")
    assert fault.endswith(": bit for bit")
