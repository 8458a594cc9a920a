"""Callables that a config names by their dotted path."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from unirl.errors import UserError


def load_callable(key: str, path: str, signature: str) -> Callable[..., Any]:
    """What `path` names, e.g. `my_package.module.function`; `key` and `signature` say in errors where it stands and
    what is expected. Raises UserError with what failed.
    """
    module_name, _, name = path.rpartition(".")
    expected = f"expected the dotted path of a callable {signature}"
    if not module_name:
        raise UserError(f"{key}={path}: {expected}")
    try:
        module = import_module(module_name)
    except (ImportError, ValueError) as error:
        raise UserError(f"{key}={path}: cannot import {module_name}: {error}; {expected}") from error
    found = getattr(module, name, None)
    if not callable(found):
        what = f"there is no {name} in {module_name}" if found is None else f"found a {type(found).__name__}"
        raise UserError(f"{key}={path}: {what}; {expected}")
    return found
