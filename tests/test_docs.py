"""Pages whose examples run one after the other print what the page says; links and mentions lead somewhere."""

import contextlib
import functools
import io
import re
import runpy
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.continuous_batching.requests import RequestStatus

import torch_mpk
from docs import reference
from tests.thinned import thinned
from torch_mpk.__main__ import main
from torch_mpk.testing.tiny import tiny_model

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])


# Every page with Python code is in one of these three. Here its blocks run one after the other, as they are written but
# for these words: the device, the checkpoint, and how large an engine is.
ON_THIS_MACHINE = {'"cuda"': '"cpu"', '"Qwen/Qwen3-0.6B"': "CHECKPOINT"}
RUN_HERE: dict[str, dict[str, str]] = {
    "README.md": ON_THIS_MACHINE
    | {"mpk_cb.config()": "mpk_cb.config(num_blocks=4, max_batch_tokens=32, max_requests_per_batch=2)"},
    "docs/how-it-works.md": {},
    "docs/index.md": {},
    "docs/profiling.md": ON_THIS_MACHINE,
    "docs/add-a-model.md": {},
}
TUTORIAL = [f"docs/{page.relative_to(DOCS)}" for page in sorted((DOCS / "tutorial").glob("*.md"))]
RUN_ELSEWHERE = {  # with the files, commands and servers that belong to them
    "docs/weights.md": "tests/models/test_quantized.py",
    "docs/add-a-task.md": "tests/tasks/test_add_a_task.py",
    "docs/coming-from.md": "tests/test_coming_from.py",
    "docs/jit.md": "tests/jit/test_docs.py",
    "docs/parallel.md": "tests/ranks/test_models.py",
    "docs/serving.md": "tests/continuous_batching/test_docs.py",
    "docs/test-mode.md": "tests/persistent_kernel/test_page.py",
}
OF_REFERENCE = {"docs/api.md"}  # signatures, and examples from docs/api_examples.py


def test_python_code_of_every_page_runs_in_a_test() -> None:
    with_code = [page for page in PAGES if re.search(r"^ *```python", page.read_text(), re.MULTILINE)]
    assert {str(page.relative_to(ROOT)) for page in with_code} == {*RUN_HERE, *TUTORIAL, *RUN_ELSEWHERE, *OF_REFERENCE}
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text()


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model in a folder, with a tokenizer of bytes. Pages run there, and find the repository's examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    tokens = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"eos_token": "!", "pad_token": "!", "model_input_names": ["input_ids", "attention_mask"]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(tmp_path)
    tiny_model(num_layers=1, vocab_size=len(tokens)).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("page", thinned(RUN_HERE, 1))
def test_a_page_runs_and_prints_what_it_says(page: str, checkpoint: str) -> None:
    names = run_examples(page, RUN_HERE[page], CHECKPOINT=checkpoint)
    if page == "README.md":
        assert all(output.status == RequestStatus.FINISHED for output in names["outputs"].values())


def test_the_readmes_calls_compile_on_a_cpu(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MPK_DUMP", "dump")
    run_examples("README.md", RUN_HERE["README.md"], last="compile_config", CHECKPOINT=checkpoint)
    assert len([*Path("dump").iterdir()]) >= 3  # a step's, generate's, and Hugging Face's generate's


@pytest.mark.parametrize("page", thinned(TUTORIAL, 1, 2, 3))
def test_a_page_of_the_tutorial_runs(page: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    run_examples(page)


def run_examples(
    page: str, substitutions: Mapping[str, str] | None = None, last: str | None = None, **names: Any
) -> dict[str, Any]:
    """Of a page whose Python blocks follow each other, and print the text block behind them. Returns its names.

    Blocks that begin with a file's name are written there. A command runs where a text block follows it.

    The page's path starts at the root or at docs/. Blocks behind the one that has ``last`` in it are left out.
    """
    path = ROOT / page if (ROOT / page).exists() else DOCS / page
    text = path.read_text()
    for written, here in (substitutions or {}).items():
        assert written in text, f"{page} no longer has {written}"
        text = text.replace(written, here)
    kinds = r"python|cpp|cuda|text|sh(?=\n[^`]*```\n\n```text)"
    blocks = re.findall(rf"^```({kinds})\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    namespace: dict[str, Any] = {"__name__": "page"} | names
    printed = ""
    for kind, block in blocks:
        if file := re.match(r"(?:#|//) (\w+\.(?:py|cpp|cuh))\n", block):
            Path(file[1]).write_text(block)
            continue
        if kind == "text":
            assert any_registers(printed) == any_registers(block)
            continue
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            if kind == "sh":
                with pytest.MonkeyPatch.context() as context:
                    context.setattr(torch.cuda, "is_available", lambda: False)
                    main(shlex.split(block.removeprefix("python -m torch_mpk ")))
            else:
                exec(compile(block, str(path), "exec"), namespace)
        printed = stdout.getvalue()
        if last and last in block:
            break
    return namespace


def any_registers(text: str) -> str:
    """How many a kernel takes is its compiler's affair."""
    return re.sub(r"\d+ registers", "registers", text.strip())


@pytest.mark.parametrize("name", reference.files())
def test_what_docstrings_and_declarations_say_is_current(name: str) -> None:
    assert (ROOT / name).read_text() == reference.files()[name], "run python docs/reference.py"


def test_every_name_of_the_api_resolves() -> None:
    names = re.findall(r"^## (torch_mpk\..*)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert len(names) > 15
    for name in names:
        assert functools.reduce(getattr, name.split(".")[1:], torch_mpk).__doc__, name
        assert name in reference.examples(), f"docs/api_examples.py has no example of {name}"


@pytest.mark.slow
def test_the_examples_of_the_api_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(DOCS / "api_examples.py"))
    assert (tmp_path / "timeline.json.gz").exists()


def test_nothing_says_to_install_from_a_registry() -> None:
    files = [*PAGES, *(ROOT / "torch_mpk").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    found = [str(file) for file in files if re.search(r"pip install[^\n`]*torch_mpk\[", file.read_text())]
    assert found == []


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as mkdocs and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {reference.anchor(heading) for heading in headings}


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
        for mention in re.findall(r"\bdocs/[\w/-]+\.md\b", file.read_text())
        if not (ROOT / mention).is_file()
    ]
    assert not gone


def test_every_page_is_in_the_sites_navigation() -> None:
    navigation = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_site_needs_no_network_and_cuts_nothing() -> None:
    """At 1,280 pixels what is wider than the page scrolls in a box of its own, and code has colour offline."""
    settings, style = (ROOT / "mkdocs.yml").read_text(), (DOCS / "site.css").read_text()
    assert "highlightjs: false" in settings and "codehilite" in settings and "extra_css: [site.css]" in settings
    for selector in (r"\.rst-content table", r"\.rst-content pre"):
        assert re.search(selector + r" \{[^}]*max-width: 100%;[^}]*overflow-x: auto;", style)
    assert re.search(r"table td,[^}]*white-space: normal;", style)
    assert len(re.findall(r"^\.codehilite \.", style, re.MULTILINE)) > 50


def test_experiments_have_one_form() -> None:
    texts = [page.read_text() for page in (DOCS / "experiments").glob("*.md") if page.stem not in ("steps", "next")]
    entries = [entry for text in texts for entry in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]
    assert len(entries) > 50
    for entry in entries:
        fields = re.findall(r"^- \*\*([\w ]+)\*\*: ", entry, re.MULTILINE)
        assert fields[:4] == ["In short", "Part", "Effect", "Why"], entry
        assert set(fields[4:]) <= {"Hazards"}, entry
        assert re.search(r"\*\*In short\*\*: ([^|\n]+ \| ){3}\d{4}-\d\d-\d\d \| [0-9a-f]{7}$", entry, re.MULTILINE), (
            entry
        )
