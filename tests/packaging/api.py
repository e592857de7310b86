"""The public signatures as text: ``python -m tests.packaging.api`` writes ``api.txt``.

Everything is read from the source, so that no extra has to be installed. One line is one thing that
a caller can use, with the name of its class before it: a change reads as a diff.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "api.txt"
MODULES = (
    "feedapi_client",
    "feedapi_client.stores",
    "feedapi_client.quarantine",
    "feedapi_client.operations",
    "feedapi_client.notifications",
    "feedapi_client.telemetry",
    "feedapi_client.monitor",
    "feedapi_client.django",
    "feedapi_client.django.command",
    "feedapi_client.spark",
    "feedapi_client.spark.ingest",
    "feedapi_client.spark.listener",
    "feedapi_client.liftbridge",
    "feedapi_client.testing",
    "feedapi_client.testing.liftbridge",
    "feedapi_client.testing.simulator",
)
"""The public modules, as docs/pages/reference/index.md lists them."""
_OPERATORS = {
    "__aenter__", "__aexit__", "__enter__", "__exit__", "__aiter__", "__anext__", "__iter__",
    "__next__", "__len__", "__bool__", "__call__", "__contains__", "__getitem__",
}  # fmt: skip


@cache
def _package() -> Any:
    return griffe.load("feedapi_client", search_paths=[str(ROOT)], allow_inspection=False)


def exports(module: str) -> list[str]:
    """Return the names in ``__all__`` of a module, sorted; none where there is no ``__all__``."""
    return sorted(_module(module).exports or ())


def signatures() -> str:
    """Return the signatures of all public names."""
    where: dict[str, str] = {}
    lines = []
    for module in MODULES:
        lines.append(f"\n# {module}\n")
        for name in exports(module):
            found = _target(_module(module)[name])
            first = where.setdefault(found.path, f"{module}.{name}")
            if first != f"{module}.{name}":
                lines.append(f"{name} = {first}\n")
            else:
                lines += [f"{line}\n" for line in _lines(name, found)]
    return "".join(lines).lstrip()


def _module(path: str) -> Any:
    return _package() if path == "feedapi_client" else _package()[path.partition(".")[2]]


def _target(found: Any) -> Any:
    return found.final_target if found.is_alias else found


def _lines(name: str, found: Any) -> Iterator[str]:
    if found.is_class:
        yield from _class(name, found)
    elif found.is_function:
        yield from _function(name, found)
    elif found.is_attribute:
        annotation = f": {found.annotation}" if found.annotation is not None else ""
        value = f" = {found.value}" if found.annotation is None else ""
        yield f"{name}{annotation}{value}"
    else:
        yield f"{name} (module)"


def _class(name: str, found: Any) -> Iterator[str]:
    bases = ", ".join(str(base) for base in found.bases if not str(base).startswith("_"))
    init = _target(found.all_members["__init__"]) if found.parameters else None
    makes = init.signature(return_type=False, name=name) if init is not None else f"{name}()"
    yield f"class {makes}{f' < {bases}' if bases else ''}"
    for member_name, alias in sorted(found.all_members.items()):
        if member_name.startswith("_") and member_name not in _OPERATORS:
            continue
        member = _target(alias)
        if member.is_function:
            yield from _function(f"{name}.{member_name}", member)
        elif member.is_attribute:
            annotation = f": {member.annotation}" if member.annotation is not None else ""
            kind = "property " if "property" in member.labels else ""
            yield f"{kind}{name}.{member_name}{annotation}"


def _function(name: str, found: Any) -> Iterator[str]:
    for each in found.overloads or [found]:
        prefix = "async " if "async" in found.labels else ""
        kind = next((k for k in ("classmethod", "staticmethod") if k in found.labels), "")
        yield f"{prefix}{f'{kind} ' if kind else ''}{each.signature(name=name)}"


if __name__ == "__main__":
    FILE.write_text(signatures(), encoding="utf-8")
    print(FILE)
