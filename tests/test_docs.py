"""The pages whose examples run one after the other and print what the page says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["index.md", "how-it-works.md"])
def test_a_page_says_what_its_examples_print(page: str) -> None:
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
