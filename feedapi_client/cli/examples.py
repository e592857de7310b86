"""The examples below the help of each command."""

from __future__ import annotations

_URL = "https://service/myfeed"

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("demo", "demo --events 100000 --seed 7", "demo --sabotage cursor-last"),
    "serve": ("serve --rate 20 --split-every 20", "serve --dialect v2-draft --port 8080"),
    "discover": (
        f"discover {_URL}",
        f"discover {_URL} --auth-env TOKEN --json",
        f"discover {_URL} --lineage 1:0 --lineage 2:0",
    ),
    "doctor": (
        f"doctor {_URL}",
        f"doctor {_URL} --auth-env TOKEN --json",
        f"doctor {_URL} --strict --ignore id-text",
    ),
    "cat": (
        f"cat {_URL} --limit 10",
        f"cat {_URL} --follow --from last --raw",
        f"cat {_URL} --store cursors.db --name report",
        f"cat {_URL} --format '%p %c %s\\n'",
        f"cat {_URL} --partition 3 --from CURSOR --ca-file company.pem --auth-env TOKEN",
    ),
    "run": (
        f"run {_URL} --handler shop.orders:handle --store cursors.db",
        f"run {_URL} --handler shop.orders:handle --store env:DATABASE_URL --share",
        f"run {_URL} --handler shop.orders:handle --store cursors.db --monitor 0.0.0.0:9464",
        f"run {_URL} --handler shop.orders:each --store cursors.db --key /id --concurrency 99",
        f"run {_URL} --handler shop.orders:handle --store cursors.db --journal 7",
    ),
    "relay": (
        f"relay {_URL} --stream orders --store relay.db --key order.id --follow",
        f"relay {_URL} --stream orders --api broker:9292 --create --exactly-once batch --follow",
        f"relay {_URL} --stream orders --store relay.db --oversized quarantine",
    ),
    "status": ("status localhost:9464", "status localhost:9464 --once"),
    "cursors ls": (
        "cursors ls --store cursors.db",
        f"cursors ls --store env:DATABASE_URL --url {_URL}",
        "cursors ls --store liftbridge://broker:9292/orders",
    ),
    "cursors show": (
        "cursors show --store cursors.db",
        f"cursors show --store liftbridge://broker:9292/orders --feed {_URL} --json",
    ),
    "cursors set": (
        "cursors set 3 CURSOR --store cursors.db",
        f"cursors set 3 _first --store cursors.db --feed {_URL} --name app",
    ),
    "cursors reset": (
        "cursors reset --store cursors.db --name app",
        "cursors reset --store cursors.db --partition 3 --yes",
    ),
    "cursors export": ("cursors export --store cursors.db > cursors.json",),
    "cursors import": (
        "cursors import cursors.json --store env:DATABASE_URL",
        "cursors import cursors.json --store liftbridge://broker:9292/orders",
    ),
    "cursors rewind": (
        "cursors rewind --to '2 hours ago' --store cursors.db --dry-run",
        "cursors rewind --to 2031-05-04T14:30 --store cursors.db --name app",
    ),
    "cursors skip": (f"cursors skip {_URL} --store cursors.db --name app",),
    "cursors drain": (f"cursors drain {_URL} 3 --store cursors.db --name app",),
    "cursors rename": ("cursors rename default orders --store cursors.db",),
    "cursors restore": (
        f"cursors restore {_URL} 3 --store cursors.db --name app",
        f"cursors restore {_URL} 3 --successor 10 --store cursors.db --name app",
    ),
    "cursors move": (
        f"cursors move https://old/feed {_URL} --store cursors.db",
        f"cursors move {_URL} feed:payments --store liftbridge://broker:9292/orders",
        f"cursors move {_URL} {_URL} --selection '{{}}' '{{\"event-types\":\"a\"}}' --store c.db",
    ),
    "leases ls": ("leases ls --store cursors.db", "leases ls --store env:DATABASE_URL --json"),
    "quarantine ls": ("quarantine ls --store cursors.db",),
    "quarantine show": ("quarantine show 17 --store cursors.db",),
    "quarantine drop": ("quarantine drop 17 --store cursors.db",),
    "quarantine replay": (
        "quarantine replay --all --store cursors.db --handler myapp.events:handle",
    ),
}
"""Arguments of ``feedapi``, by command."""


def epilog(command: str) -> str:
    """Return the examples of a command, one a paragraph, as Typer shows them."""
    return "\n\n".join(["Examples:", *(f"feedapi {example}" for example in EXAMPLES[command])])
