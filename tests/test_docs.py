"""Pages whose examples run one after the other print what the page says; links and mentions lead somewhere."""

import contextlib
import functools
import io
import re
from pathlib import Path

import pytest

import torch_mpk
from docs import reference
from tests.thinned import thinned
from torch_mpk.testing.tiny import random_ids, tiny_model

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])


@pytest.mark.parametrize("page", thinned(["index.md", "how-it-works.md"], 1))
def test_a_page_says_what_its_examples_print(page: str) -> None:
    run_examples(page)


def run_examples(page: str) -> None:
    """Of a page whose Python blocks follow each other, and print the text block behind them."""
    blocks = re.findall(r"^```(python|text)\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    namespace: dict = {"__name__": "page"}
    printed = ""
    for kind, text in blocks:
        if kind == "text":
            assert printed.strip() == text.strip()
            continue
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            exec(compile(text, str(DOCS / page), "exec"), namespace)
        printed = stdout.getvalue()


def test_the_readmes_generate_compiles_on_a_cpu_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MPK_DUMP", str(tmp_path))
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "compile_config" in block)
    exec(block, {"model": tiny_model(num_layers=1), "prompt": random_ids(1, 3)})
    assert [folder.name for folder in tmp_path.iterdir()] == ["001"]


@pytest.mark.parametrize("name", reference.files())
def test_what_docstrings_and_declarations_say_is_current(name: str) -> None:
    assert (ROOT / name).read_text() == reference.files()[name], "run python docs/reference.py"


def test_every_name_of_the_api_resolves() -> None:
    names = re.findall(r"^## (torch_mpk\..*)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert len(names) > 15
    for name in names:
        assert functools.reduce(getattr, name.split(".")[1:], torch_mpk).__doc__, name


def test_nothing_says_to_install_from_a_registry() -> None:
    files = [*PAGES, *(ROOT / "torch_mpk").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    found = [str(file) for file in files if re.search(r"pip install[^\n`]*torch_mpk\[", file.read_text())]
    assert found == []


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as mkdocs and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def test_links_lead_to_files_and_headings() -> None:
    dead = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert not dead


def test_pages_that_comments_mention_exist() -> None:
    folders = ["torch_mpk", "csrc", "include", "tests", "benchmarks", "examples", "docs"]
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file()]
    suffixes = {".py", ".pyi", ".cpp", ".h", ".cuh", ".hpp", ".cu", ".md"}
    gone = [
        f"{file.relative_to(ROOT)}: {mention}"
        for file in files
        if file.suffix in suffixes
        for mention in re.findall(r"\bdocs/[\w-]+\.md\b", file.read_text())
        if not (ROOT / mention).is_file()
    ]
    assert not gone


def test_every_page_is_in_the_sites_navigation() -> None:
    navigation = re.findall(r"^  - .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(page.name for page in DOCS.glob("*.md"))


def test_experiments_have_one_form() -> None:
    entries = re.split(r"^### ", (DOCS / "experiments.md").read_text().partition("\n### ")[2], flags=re.MULTILINE)
    assert len(entries) > 50
    for entry in entries:
        fields = re.findall(r"^- \*\*(\w+)\*\*: ", entry.partition("\n## ")[0], re.MULTILINE)
        assert fields[:3] == ["Part", "Effect", "Why"], entry
        assert set(fields[3:]) <= {"Hazards"}, entry
