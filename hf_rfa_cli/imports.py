"""``--import``: feature maps, rules of importance and families from outside, for the commands that load or make models."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import starting
from .options import UsageError
from .threads import name_threads

Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Module to import first, a name or a .py file: it registers a feature map, a rule of importance or a family. "
        "May be repeated.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Threads on a CPU. Default: as many as cores are free when the command starts."),
]


def importing(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command with the options ``--import`` and ``--threads`` added, which act before the command does."""

    @wraps(command)
    def run(import_first: Sequence[str] | None = None, threads: int | None = None, **options: Any) -> Any:
        if threads is not None:
            name_threads(threads)
        import_modules(import_first or ())
        return command(**options)

    signature = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in (("import_first", Imports), ("threads", Threads))
    ]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    return run


def import_modules(names: Sequence[str]) -> None:
    """Import modules that Python finds, and ``.py`` files, each once; a `UsageError` says what is wrong with one."""
    for name in names:
        starting(f"importing {name}")
        try:
            _import_file(Path(name).resolve()) if name.endswith(".py") else importlib.import_module(name)
        except (ImportError, FileNotFoundError) as error:
            raise UsageError(
                f"--import {name}: {error}. Pass the name of a module that Python finds, or its file's path, such as "
                f"{name.removesuffix('.py')}.py."
            ) from error
        except ValueError as error:  # of what it registers
            raise UsageError(f"--import {name}: {error}") from error


def _import_file(path: Path) -> None:
    """Import a file under its own name, its folder being the last one on Python's path."""
    sys.path.append(str(path.parent))
    try:
        importlib.invalidate_caches()
        spec = importlib.util.find_spec(path.stem)
        if spec is None:
            raise FileNotFoundError(f"there is no file {path}")
        if Path(spec.origin or "").resolve() != path:
            raise UsageError(f"--import {path.name}: {path.stem} is another module's name. Rename the file.")
        importlib.import_module(path.stem)
    finally:
        sys.path.remove(str(path.parent))
