"""Prints figures of the house: its size, and who knows of the backend and of NaN.

    python -m tests.house

Imports nothing of the package, whose files it reads as syntax.
"""

import ast
import io
import pathlib
import re
import tokenize

ROOT = pathlib.Path(__file__).parents[1] / "keras_rfattn"
BACKENDS = ("jax", "tensorflow", "torch")
# Folders that may ask for the backend.
EXECUTION = ("backend", "fused", "experimental")
# Folders that are no part of the core.
OUTSIDE = ("papers", "experimental")
# Folders of the core that have a bar of their own.
COUNTED = ("backend", "ops", "feature_maps", "models", "uptraining", "maps")
# Files that decide what happens to tokens that are not finite: the door, states, masks.
DOOR = re.compile(r"layers/not_finite\.py|.*(state|mask)\w*\.py")
NOT_FINITE = re.compile(r"(?<![a-z])(nan|isnan|isfinite|finite|spoil\w*)(?![a-z])")
ASKS = re.compile(r"\b(backend|config)\.backend\(")
LAYOUT_TOKENS = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def files(root=ROOT):
    """Returns the Python files below a folder."""
    return sorted(root.rglob("*.py"))


def name_of(file):
    """Returns the path of a file of the package below its root."""
    return file.relative_to(ROOT).as_posix()


def part_of(file):
    """Returns "papers", "experimental" or "core"."""
    folder = file.relative_to(ROOT).parts[0]
    return folder if folder in OUTSIDE else "core"


def lines():
    """Returns the number of lines of the core, of folders of it and of the outside."""
    counts = dict.fromkeys(("core", *COUNTED, *OUTSIDE), 0)
    for file in files():
        count = len(file.read_text().splitlines())
        counts[part_of(file)] += count
        folder = file.relative_to(ROOT).parts[0]
        if folder in COUNTED:
            counts[folder] += count
    return counts


def public_names(file):
    """Returns the names in a file's `__all__`, none if it has none."""
    for node in ast.parse(file.read_text()).body:
        names = [getattr(x, "id", "") for x in getattr(node, "targets", ())]
        if names == ["__all__"]:
            return ast.literal_eval(node.value)
    return []


def module(file):
    """Returns the dotted name of a file of the package."""
    parts = ["keras_rfattn", *file.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file, top_level_only=False):
    """Yields the dotted names of what a file imports.

    Args:
        file: Path of the file.
        top_level_only: Whether imports inside functions are left out.
    """
    tree = ast.parse(file.read_text())
    for node in outside_functions(tree) if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {file.name}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def outside_functions(node):
    """Yields the nodes of a syntax tree that run when the file is imported."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from outside_functions(child)


def edges():
    """Returns, for each module of the package, the set of those that it imports.

    Imports inside functions count.
    """
    modules = {module(file): file for file in files()}
    found = {}
    for name, file in modules.items():
        # `from a.b import c` imports the file a/b/c.py, or else a name of a/b.
        hits = {x if x in modules else x.rpartition(".")[0] for x in imports(file)}
        found[name] = (hits & set(modules)) - {name}
    return found


def circles(graph):
    """Returns the groups of nodes that import each other, each as a sorted tuple.

    Args:
        graph: A dict from each node to the set of those that it imports.
    """
    reach = {node: _reachable(graph, node) for node in graph}
    groups = {
        tuple(sorted(x for x in reach[node] if node in reach[x]))
        for node in graph
        if node in reach[node]
    }
    return sorted(groups)


def _reachable(graph, start):
    found, left = set(), [start]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left.extend(new)
    return found


def code(file):
    """Returns the lines of a file without docstrings, comments and blank lines."""
    text = file.read_text()
    lines = text.splitlines()
    hidden = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            hidden |= set(range(body[0].lineno, body[0].end_lineno + 1))
    kept = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
        elif token.type not in LAYOUT_TOKENS:
            rows = range(token.start[0], token.end[0] + 1)
            kept.update(dict.fromkeys(row for row in rows if row not in hidden))
    return [lines[row - 1] for row in sorted(kept)]


def _is_text(node):
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def asks_for_backend(file):
    """Returns whether a file asks for the backend, or imports one."""
    roots = {x.partition(".")[0] for x in imports(file)}
    return bool(roots & set(BACKENDS) or ASKS.search("\n".join(code(file))))


def knows_of_nan(file):
    """Returns whether the code of a file speaks of numbers that are not finite."""
    return bool(NOT_FINITE.search("\n".join(code(file)).lower().replace("_", " ")))


def figures():
    """Returns what the script prints: pairs of a text and a number or a list."""
    every = {name_of(file): file for file in files()}
    outside = {n: f for n, f in every.items() if n.split("/")[0] not in EXECUTION}
    return [
        *((f"lines of {part}", count) for part, count in lines().items()),
        (
            "lines without docstrings, comments and blanks",
            sum(len(code(file)) for file in every.values()),
        ),
        (
            "files outside backend/ and fused/ that ask for the backend",
            [n for n, f in outside.items() if asks_for_backend(f)],
        ),
        (
            "files that know of NaN outside the door, states and masks",
            [
                n
                for n, f in outside.items()
                if not DOOR.fullmatch(n) and knows_of_nan(f)
            ],
        ),
        ("circles of imports", [" ".join(x) for x in circles(edges())]),
    ]


def main():
    for text, found in figures():
        print(f"{len(found) if isinstance(found, list) else found:6} {text}")
        for name in found if isinstance(found, list) else ():
            print(f"           {name}")


if __name__ == "__main__":
    main()
