"""``--import``: feature maps from outside this package, for the commands that load or make models."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import UsageError

IMPORT = typer.Option(
    "--import",
    metavar="MODULE",
    help="Import a module first, by its name or as a .py file: one that registers a feature map. May be repeated.",
)


def importing(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command with the option ``--import`` added, which acts before the command does."""

    @wraps(command)
    def run(import_first: Sequence[str] | None = None, **options: Any) -> Any:
        import_modules(import_first or ())
        return command(**options)

    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter(
        "import_first", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[str] | None, IMPORT]
    )
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    return run


def import_modules(names: Sequence[str]) -> None:
    """Import modules, each of them once.

    Args:
        names: of modules that Python finds, or paths of ``.py`` files.

    Raises:
        UsageError: if one cannot be found, or a file has the name of another module.
    """
    for name in names:
        try:
            _import_file(Path(name).resolve()) if name.endswith(".py") else importlib.import_module(name)
        except (ImportError, FileNotFoundError) as error:
            raise UsageError(
                f"--import {name}: {error}. Pass the name of a module that Python finds, or its file's path, such as "
                f"{name.removesuffix('.py')}.py."
            ) from error


def _import_file(path: Path) -> None:
    """Import a file under its own name, as if its folder were on Python's path."""
    name = path.stem
    known = importlib.util.find_spec(name)
    if known is not None and Path(known.origin or "").resolve() != path:
        raise UsageError(f"--import {path.name}: {name} is another module's name. Rename the file.")
    if known is not None:
        importlib.import_module(name)
        return
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
