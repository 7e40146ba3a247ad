"""The user's main module in a worker, where `import_main=True` asks for it; as multiprocessing does."""

from __future__ import annotations

import os
import runpy
import sys
import types

__all__ = ["find_main", "import_main", "refuse_in_import"]

_importing = False


def find_main() -> tuple[str, str]:
    """How a worker can import this process's main module: `("name", module name)` or `("path", file)`.

    Raises:
        ValueError: If it cannot: it was typed in or given on the command line, or is the `__main__.py` of a package,
            which by its nature runs whenever it is imported.
    """
    main = sys.modules["__main__"]
    # Objects that workers send back name their classes by the name that the main module has there.
    sys.modules.setdefault("__mp_main__", main)
    name = getattr(getattr(main, "__spec__", None), "name", None)
    path = getattr(main, "__file__", None)
    if name is not None and name.rpartition(".")[2] != "__main__":
        return "name", name
    if name is None and path is not None and os.path.isfile(path):
        return "path", os.path.abspath(path)
    raise ValueError(
        f"import_main=True needs a main module that workers can import, a script or `python -m module`; this is "
        f"{name or path or 'an interactive one'}. Leave import_main out: functions and classes of the main module are "
        "sent to the workers without it."
    )


def import_main(kind: str, where: str) -> None:
    """In a worker: run the main module under the name `__mp_main__`, and let `__main__` mean it from then on.

    Args:
        kind: "name" or "path", as `find_main` returned it.
        where: Name of the module, or path of the file.
    """
    global _importing
    module = types.ModuleType("__mp_main__")
    run = runpy.run_module if kind == "name" else runpy.run_path
    _importing = True
    try:
        found = run(where, run_name="__mp_main__")
    finally:
        _importing = False
    module.__dict__.update(found)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def refuse_in_import() -> None:
    """Refuse to start workers while this one imports the main module: each would do the same, without an end.

    Raises:
        RuntimeError: If that is so.
    """
    if _importing:
        raise RuntimeError(
            "With import_main=True every worker imports the main module, which makes workers itself. Put what it does "
            "when it runs under `if __name__ == '__main__':`, or leave import_main out."
        )
