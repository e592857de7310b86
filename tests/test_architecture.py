"""The architecture: imports run downwards, the core does no I/O, one module writes the fields of a
partition, the package works without its extras, and public names are pinned.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import typing
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import httpx
import pytest

import feedapi_client
import feedapi_client.django
import feedapi_client.monitor
import feedapi_client.notifications
import feedapi_client.operations
import feedapi_client.stores
import feedapi_client.testing
from tests.conftest import FIRST_FILES

ROOT = Path(feedapi_client.__file__).parent
ADAPTERS = ("cli", "django", "spark", "liftbridge", "testing")
SANS_IO = ("errors", "status", "notifications", "options", "model", "protocol", "lineage")
# From the bottom up: a module may import its own layer and those before it.
LAYERS = (
    ("errors", "status"),
    ("notifications",),
    ("arguments", "causes", "options", "model", "retry"),
    ("protocol",),
    ("lineage",),
    ("http",),
    ("stores",),
    ("quarantine",),
    ("client",),
    ("runtime",),
    ("sharing",),
    ("consumer",),
    ("sync",),
    ("operations",),
    ("telemetry",),
    ("monitor",),
    ADAPTERS,
)
# The same within `feedapi_client/runtime`.
RUNTIME_LAYERS = (
    (
        "handling",
        "key_order",
        "logs",
        "loop",
        "loop_thread",
        "pace",
        "sharing",
    ),
    ("iteration", "scheduling", "topology", "waiting"),
    ("positions", "trouble"),
    ("partition",),
    ("planning",),
    ("late", "running"),
    ("done_ahead", "fetching"),
    ("delivery", "discovery"),
    ("by_key", "delegating"),
    ("watchdog",),
    ("board",),
    ("session",),
)
# Adapters that make an HTTP client for the library, from options of their own.
MAKE_HTTP_CLIENTS = ("cli", "liftbridge", "spark", "testing")
EXTRAS = [
    "django",
    "asgiref",
    "sqlalchemy",
    "psycopg",
    "psycopg_pool",
    "asyncpg",
    "redis",
    "typer",
    "rich",
    "uvicorn",
    "starlette",
    "prometheus_client",
    "pyspark",
    "pyarrow",
    "obstore",
    "nats",
    "google",
    "gufo",
    "opentelemetry",
    "pandas",
    "grpc",
]

PUBLIC = {
    feedapi_client: """
        FIRST LAST AlreadyDoneError AmbiguousLineageError AuthenticationError Batch
        BufferLimitError CommitOrderError ConsumerStatus CursorRejectedError CursorStore Event
        FeedClient FeedConsumer FeedError
        FeedInfo FeedKey FeedUnavailableError FencedError FetchOptions Health HostError Journal
        LeaseLostError Limits LineTooLongError LineageError LostPartitionError MemoryCursorStore
        NegotiationError NoProgressError OAuthClientCredentials Page Partition PartitionState
        PartitionStatus PartitionWait Position Problem ProblemName ProtocolError Quarantine
        Reached RequestRefusedError Retry RetryPolicy SQLiteCursorStore Share
        StoreError SyncBatch SyncFeedClient SyncFeedConsumer TokenFile TornResponseError
        TransportError default_decision redact_http_logs
    """,
    feedapi_client.django: "DjangoCursorStore DjangoQuarantineStore",
    feedapi_client.monitor: "Monitor MonitorServer serve",
    feedapi_client.notifications: """
        BatchCommitted BatchDelivered DiscoveryEnded EventQuarantined EventsPassedOver FetchEnded
        HandlerFailed
        IterationEnded PartitionAssigned PartitionDrained PartitionReleased PartitionStarted
        PartitionSuperseded PartitionVanished ProblemFound ProblemGone
    """,
    feedapi_client.operations: """
        Change FeedAccess FeedLeases FeedPositions LagState OperationError PartitionLag Skipped
        check_unused drain export_positions import_positions lag list_leases list_positions move
        parse_export rename reset restore rewind set_position skip
    """,
    feedapi_client.stores: """
        AdministrableStore Claim CursorStore DoneEvent DoneStore Instance Journal JournalledStore
        Lease LeaseStore MemoryCursorStore PostgresCursorStore RedisCursorStore
        SQLAlchemyCursorStore SQLiteCursorStore View in_callers_thread
    """,
    feedapi_client.testing: """
        AdministrableStoreContract CursorStoreContract DoneStoreContract Fault FaultRule
        LeaseStoreContract Publisher Quirks Request Response Serving faults
    """,
}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package, without the package's name, and its file."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "pyspark_feedapi" not in parts:
            yield ".".join(parts if parts[-1] != "__init__" else parts[:-1]), path


@cache
def imports(path: Path, *, lazy: bool = True) -> tuple[str, ...]:
    """What a module imports at run time: no `TYPE_CHECKING`, with `lazy` also within functions."""

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                assert child.module is not None
                yield child.module
                yield from (
                    f"{child.module}.{alias.name}"
                    for alias in child.names
                    if (child.module, alias.name) in SUBMODULES
                )
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                yield from (name for other in child.orelse for name in visit(other))
            elif lazy or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from visit(child)

    return tuple(visit(ast.parse(path.read_text())))


SUBMODULES = {
    (
        (f"feedapi_client.{name}".rpartition(".")[0] if "." in name else "feedapi_client"),
        name.rpartition(".")[2],
    )
    for name, _ in modules()
    if name
}


def own(name: str) -> str | None:
    """A module of this package, without the package's name; None for any other module."""
    return name.removeprefix("feedapi_client.") if name.startswith("feedapi_client.") else None


def layer(module: str, layers: tuple[tuple[str, ...], ...]) -> int:
    """The number of a module's layer, from the bottom up."""
    for number, names in enumerate(layers):
        if module in names:
            return number
    raise AssertionError(f"feedapi_client: {module} is in no layer: give it one in this file")


def test_the_files_with_a_treatment_of_their_own_exist() -> None:
    assert [name for name in FIRST_FILES if not (ROOT.parent / name).is_file()] == []


def test_imports_run_downwards_only() -> None:
    for module, path in modules():
        if not module:
            continue
        for target in filter(None, map(own, imports(path))):
            above, below = target.partition(".")[0], module.partition(".")[0]
            assert layer(above, LAYERS) <= layer(below, LAYERS), (
                f"feedapi_client.{module} imports {target}, which is in a layer above it"
            )


def test_imports_within_the_runtime_run_downwards_only() -> None:
    for module, path in modules():
        package, _, name = module.partition(".")
        if package != "runtime" or not name:
            continue
        for target in filter(None, map(own, imports(path))):
            package, _, other = target.partition(".")
            if package == "runtime" and other:
                assert layer(other, RUNTIME_LAYERS) <= layer(name, RUNTIME_LAYERS), (
                    f"feedapi_client.{module} imports {target}, which is in a layer above it"
                )


def test_each_public_class_of_a_part_has_a_name_of_its_own() -> None:
    """A name that is searched for in a part leads to one place."""
    names = Counter(
        (module.partition(".")[0], node.name)
        for module, path in modules()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_adapters_do_not_import_each_other() -> None:
    """The command line does, when a command needs one. `testing` may use `liftbridge`."""
    for module, path in modules():
        top = module.partition(".")[0]
        if top not in ADAPTERS:
            continue
        for target in filter(None, map(own, imports(path, lazy=top != "cli"))):
            other = target.partition(".")[0]
            allowed = (
                other == top
                or other not in ADAPTERS
                or (top, other) in {("testing", "liftbridge"), ("cli", "testing")}
                or (module, other) == ("spark.liftbridge_sink", "liftbridge")
            )
            assert allowed, f"feedapi_client.{module} imports {target}"


def test_imports_make_no_cycle() -> None:
    known = {module: path for module, path in modules() if module}
    edges = {
        module: {
            target
            for target in filter(None, map(own, imports(path, lazy=False)))
            if target in known
        }
        for module, path in known.items()
    }
    # A package's __init__ is a facade: its modules import each other, never the facade.
    TopologicalSorter({module: targets - {module} for module, targets in edges.items()}).prepare()


def test_only_http_imports_httpx() -> None:
    """An adapter may make the client that the application would give to the library."""
    found = {
        module.partition(".")[0]
        for module, path in modules()
        if any(name.partition(".")[0] == "httpx" for name in imports(path))
    }
    assert "http" in found
    assert found <= {"http", *MAKE_HTTP_CLIENTS}


def test_the_core_does_no_io() -> None:
    names = [module for module, _ in modules() if module.partition(".")[0] in SANS_IO]
    program = f"""
import importlib, sys, types
package = types.ModuleType("feedapi_client")  # without what its __init__ imports
package.__path__ = [{str(ROOT)!r}]
sys.modules["feedapi_client"] = package
for name in {names!r}:
    importlib.import_module("feedapi_client." + name)
banned = {{"httpx", "anyio", "asyncio", "trio", "socket", "ssl", "sqlite3", "tenacity"}}
ours = ("feedapi_client.stores", "feedapi_client.http")
print([name for name in sys.modules if name in banned or name.startswith(ours)])
"""
    assert run(program) == "[]"


def run(program: str) -> str:
    """What a program prints, in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BLOCKED = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def test_the_package_works_without_any_extra(tmp_path: Path) -> None:
    program = f"""{BLOCKED}
import anyio, httpx
import feedapi_client
from feedapi_client import *
from feedapi_client.stores import SQLiteCursorStore
from feedapi_client.testing import Publisher
async def main():
    publisher = Publisher(1)
    publisher.append(0, {{"n": 1}})
    transport = httpx.ASGITransport(publisher.asgi)
    async with (
        httpx.AsyncClient(transport=transport) as http,
        SQLiteCursorStore({str(tmp_path / "c.db")!r}) as store,
        FeedConsumer("http://feed/feed", http=http, store=store, follow=False) as consumer,
    ):
        print([event.json() async for event in consumer])
anyio.run(main)
"""
    assert run(program) == "[{'n': 1}]"


@pytest.mark.parametrize(
    ("statement", "extra"),
    [
        ("from feedapi_client import SQLAlchemyCursorStore", "sql"),
        ("import feedapi_client.stores.sql", "sql"),
        ("from feedapi_client import RedisCursorStore", "redis"),
        ("import feedapi_client.stores.redis", "redis"),
        ("import feedapi_client.django", "django"),
        ("import feedapi_client.spark", "spark"),
        ("import feedapi_client.liftbridge", "liftbridge"),
        ("import feedapi_client.telemetry", "telemetry"),
        ("import feedapi_client.monitor", "monitor"),
        ("import feedapi_client.testing.publisher.server", "testing"),
        ("from feedapi_client.testing import Publisher; Publisher().serve()", "testing"),
        ("import feedapi_client.cli; feedapi_client.cli.main()", "cli"),
    ],
)
def test_an_import_that_needs_an_extra_names_it(statement: str, extra: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{BLOCKED}\n{statement}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert f"pip install 'feedapi-client[{extra}]'" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_public_names_are_pinned(module: object) -> None:
    assert sorted(module.__all__) == sorted(PUBLIC[module].split())  # type: ignore[attr-defined, index]


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_name_exists_and_is_documented(module: object) -> None:
    for name in module.__all__:  # type: ignore[attr-defined]
        value = getattr(module, name)
        if not isinstance(value, str):
            assert inspect.getdoc(value), f"{name} has no docstring"
        if inspect.isclass(value):
            for member, thing in vars(value).items():
                if not member.startswith(("_", "test_")) and (
                    inspect.isfunction(thing) or isinstance(thing, property)
                ):
                    assert inspect.getdoc(thing), f"{name}.{member} has no docstring"


@pytest.mark.parametrize("name", ["SQLAlchemyCursorStore", "RedisCursorStore"])
def test_stores_of_an_extra_can_be_imported_from_the_package(name: str) -> None:
    """Not in `__all__`: a star import must not ask for the extra."""
    assert getattr(feedapi_client, name) is getattr(feedapi_client.stores, name)


@pytest.mark.parametrize("module", [feedapi_client, feedapi_client.testing])
def test_a_session_lists_what_a_star_import_brings(module: ModuleType) -> None:
    listed = {name for name in dir(module) if not name.startswith("__")}
    assert listed == set(module.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    for module in PUBLIC:
        with pytest.raises(AttributeError):
            _ = module.NoSuchName


def test_type_hints_can_be_resolved() -> None:
    assert (
        typing.get_type_hints(feedapi_client.FeedConsumer.__init__)["http"]
        == httpx.AsyncClient | None
    )
    assert (
        typing.get_type_hints(feedapi_client.FeedClient.__init__)["http"]
        == httpx.AsyncClient | None
    )
    assert (
        typing.get_type_hints(feedapi_client.SyncFeedClient.__init__)["http"] == httpx.Client | None
    )
    for name in feedapi_client.__all__:
        value = getattr(feedapi_client, name)
        if inspect.isclass(value):
            for thing in vars(value).values():
                if inspect.isfunction(thing):
                    typing.get_type_hints(thing)


def test_the_parameters_of_the_consumer_are_pinned() -> None:
    parameters = inspect.signature(feedapi_client.FeedConsumer).parameters
    assert list(parameters) == [
        "url",
        "store",
        "name",
        "start",
        "ordered",
        "follow",
        "partitions",
        "decoder",
        "v1_partitions",
        "lineage",
        "share",
        "feed_name",
        "fetch",
        "retry",
        "limits",
        "on_error",
        "http",
    ]
    defaults = {
        name: p.default
        for name, p in parameters.items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert (
        defaults["name"],
        defaults["start"],
        defaults["ordered"],
        defaults["follow"],
        defaults["on_error"],
    ) == ("default", None, True, True, "raise")


def test_the_exception_tree_is_drawn_in_the_docstring() -> None:
    errors = importlib.import_module("feedapi_client.errors")
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]
        name = line.lstrip(" │├└─").split(" ")[0]
        if (
            name.endswith("Error")
            and (line.startswith(" " * 4) or "─" in line)
            and hasattr(errors, name)
        ):
            depth = (len(line) - len(line.lstrip(" │├└─"))) // 4
            path[depth - 1 :] = [name]
            drawn[name] = path[-2] if len(path) > 1 else "Exception"
    kinds = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and kind.__module__ == errors.__name__
    }
    assert drawn == {name: kind.__bases__[0].__name__ for name, kind in kinds.items()}
