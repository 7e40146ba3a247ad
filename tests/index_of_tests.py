"""Lists of what went wrong elsewhere, and of the tests that it does not here."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def missing(entries):
    """The entries, `"file: name name ..."` (names without `test_`), that name a test that is not there."""
    return [entry for entry in entries if not _is_there(*entry.split(": "))]


def _is_there(file, names):
    tree = ast.parse((TESTS / file).read_text("utf-8"))
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {f"test_{name}" for name in names.split()} <= there
