"""Which code finds variables by texts that it computes."""

import pytest

from keras_fastdata.building.code_names import computes_names


def _code(expression):
    variables = {}
    exec(f"def code(self, name, config): return {expression}", variables)
    return variables["code"].__code__


@pytest.mark.parametrize(
    "expression",
    [
        "getattr(config, name)",
        "getattr(config, name, None)",
        "getattr(config, f'A_{name}')",
        "getattr(config, 'A_' + name, 3)",
        "getattr(getattr(config, name), 'y')(3)",
        "[getattr(config, part) for part in name]",
        "list(map(getattr, [config], name))",
        "hasattr(config, name)",
        "vars(config)[name]",
        "config.__dict__[name]",
        "globals()[name]",
    ],
)
def test_code_that_computes_a_name_is_known(expression):
    assert computes_names(_code(expression))


@pytest.mark.parametrize(
    "expression",
    [
        "getattr(config, 'x')",
        "getattr(config, 'x', name)",
        "getattr(getattr(config, 'x'), 'y')(3)",
        "getattr(config, 'x')() if name else None",
        "[getattr(part, 'x') for part in self.parts]",
        "print(getattr(self, 'a'), getattr(self, 'b', None))",
        "hasattr(config, 'x') and getattr(config, 'x')",
        "self.x + config.y",
    ],
)
def test_code_that_computes_no_name_is_known(expression):
    assert not computes_names(_code(expression))
