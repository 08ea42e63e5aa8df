"""Reads and sets the global settings of frameworks that batches depend on.

Only of frameworks that are imported already: none is imported for this. The
current folder is a setting of the module `os`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from keras_fastdata._modules import current_folder, loaded

SettingsByModule = dict[str, dict[str, Any]]  # by module and name

# The settings of each module, as the module begins with them.
_DEFAULTS: SettingsByModule = {
    "keras": {
        "floatx": "float32",
        "epsilon": 1e-7,
        "image_data_format": "channels_last",
    },
    "torch": {"default_dtype": "float32"},
    "jax": {"jax_enable_x64": False},
    "PIL.Image": {"MAX_IMAGE_PIXELS": 89_478_485},
    "PIL.ImageFile": {"LOAD_TRUNCATED_IMAGES": False},
}

# How a setting is read, where it is no attribute of the module.
_READERS: dict[str, Callable[[Any, str], Any]] = {
    "keras": lambda keras, name: getattr(keras.config, name)(),
    "torch": lambda torch, _: str(torch.get_default_dtype()).rpartition(".")[2],
    "jax": lambda jax, name: getattr(jax.config, name),
}

# How a setting is set, likewise.
_WRITERS: dict[str, Callable[[Any, str, Any], object]] = {
    "keras": lambda keras, name, value: getattr(keras.config, f"set_{name}")(
        value
    ),
    "torch": lambda torch, _, value: torch.set_default_dtype(
        getattr(torch, value)
    ),
    "jax": lambda jax, name, value: jax.config.update(name, value),
    "numpy": lambda numpy, name, value: numpy.seterr(**{name: value}),
    "os": lambda os, _, folder: folder and os.chdir(folder),
}


def read() -> SettingsByModule:
    """Returns the settings of the imported frameworks, but NumPy's.

    NumPy has one error state for each thread.
    """
    found: SettingsByModule = {}
    for module_name, settings in _DEFAULTS.items():
        if (module := loaded(module_name)) is not None:
            reader = _READERS.get(module_name, getattr)
            found[module_name] = {
                name: reader(module, name) for name in settings
            }
    return found


def read_all(
    error_state: Mapping[str, object], *, has_folder: bool
) -> SettingsByModule:
    """Returns all settings, with NumPy's error state as it is given.

    The current folder is among them on request; "" if somebody has removed it.
    """
    folder = {"os": {"folder": current_folder()}} if has_folder else {}
    return {"numpy": dict(error_state), **folder, **read()}


def changed() -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of each setting that has no default value."""
    for module_name, settings in read().items():
        for name, value in settings.items():
            if value != _DEFAULTS[module_name][name]:
                yield f"{module_name}.{name}", value


def write(module_name: str, module: Any, settings: dict[str, Any]) -> None:
    """Sets the settings of a framework."""
    writer: Callable[[Any, str, Any], object]
    writer = _WRITERS.get(module_name, setattr)
    for name, value in settings.items():
        writer(module, name, value)
