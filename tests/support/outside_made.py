"""Makes a module of a text, as configuration tools do."""

from __future__ import annotations

import types

made = types.ModuleType("made")
exec("scale = 1", vars(made))


def scale_made():
    return made.scale
