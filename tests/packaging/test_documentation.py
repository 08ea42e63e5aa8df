"""The README and the pages of `docs`: their code runs, and no name is missing.

A page's blocks of Python run in order, as one script. A comment may have code
that a reader need not see: `<!-- run: ... -->`. A page whose code needs a
package that the tests do not need says so: `<!-- needs: ray -->`.
"""

from __future__ import annotations

import pathlib
import re

import pytest

import keras_fastdata
from keras_fastdata import sources

_ROOT = pathlib.Path(__file__).parents[2]
_CODE = re.compile(
    r"^```python\n(?P<shown>.*?)^```$|^<!-- run:\n(?P<hidden>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)
_NEEDS = re.compile(r"^<!-- needs: (\w+) -->$", re.MULTILINE)

if not (_ROOT / "mkdocs.yml").exists():
    pytest.skip("the pages are not here", allow_module_level=True)


def _script_of(text):
    """The code of a page, each line where it is in the page."""
    script, end = [], 0
    for block in _CODE.finditer(text):
        name = "shown" if block["hidden"] is None else "hidden"
        script += ["\n" * text.count("\n", end, block.start(name)), block[name]]
        end = block.end(name)
    return "".join(script)


def _pages():
    """The pages that have code, by their paths."""
    paths = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
    for path in paths:
        name = str(path.relative_to(_ROOT))
        if _script_of(path.read_text()) and "upstream" not in name:
            yield name


def test_code_stays_in_the_line_where_it_is_in_the_page():
    page = "a\n```python\nb\n```\n\n<!-- run:\nc\n-->\n```text\nd\n```\n"
    lines = _script_of(page).splitlines()
    assert [(n, line) for n, line in enumerate(lines, 1) if line] == [
        (3, "b"),
        (7, "c"),
    ]


@pytest.mark.parametrize("page", [*_pages()])
def test_the_code_of_a_page_runs(page, zygote, tmp_path):
    text = (_ROOT / page).read_text()
    for package in _NEEDS.findall(text):
        pytest.importorskip(package)
    script = tmp_path / f"{pathlib.Path(page).stem}.py"
    script.write_text(_script_of(text))
    ended = zygote.run(script, folder=tmp_path, MPLBACKEND="agg")
    assert ended.returncode == 0, ended.stderr


def test_the_reference_has_every_public_name():
    pages = (_ROOT / "docs" / "reference").glob("*.md")
    text = "\n".join(path.read_text() for path in pages)
    found = re.findall(r"^::: keras_fastdata\.([\w.]+)$", text, re.MULTILINE)
    public = {*keras_fastdata.__all__, *keras_fastdata._MODULES}
    public |= {f"sources.{name}" for name in sources.__all__}
    # What the functions of a module have in common is said by the module.
    assert sorted(found) == sorted(public - {"sources"} | {"datasets.twins"})
