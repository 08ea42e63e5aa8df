"""Writes modules that workers import."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a module; the test's end removes all."""
    written = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)
        written.append(name)

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for name in written:
        sys.modules.pop(name, None)
