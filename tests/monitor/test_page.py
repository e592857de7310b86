"""The monitor's page in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from feedapi_client import Batch
from feedapi_client.testing import Publisher
from tests.monitor import scenes
from tests.monitor.browser import Browser

pytestmark = pytest.mark.slow

NODES = "document.querySelectorAll('#drawing .node').length"
HOSTILE = '<img src=x onerror="document.title=1">\u202e'


@pytest.fixture
def page(chromium: Browser) -> Iterator[Browser]:
    """The browser, and a check that nothing was complained about or fetched from elsewhere."""
    chromium.resize(1280, 900)
    chromium.requests.clear()
    chromium.complaints.clear()
    yield chromium
    origin = chromium.evaluate("location.origin")
    elsewhere = [url for url in chromium.requests if not url.startswith((origin, "data:,"))]
    chromium.open("about:blank")
    assert elsewhere == []
    assert chromium.complaints == []


def text(page: Browser, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({selector!r}).textContent"))


def state_of(page: Browser, partition: int) -> str:
    return str(
        page.evaluate(
            f"document.querySelector('#drawing [data-id=\"{partition}\"]')"
            ".getAttribute('class').split(' ')[1]"
        )
    )


def test_it_draws_a_split_while_it_happens(page: Browser) -> None:
    with scenes.split() as url:
        page.open(url)
        page.wait_for(f"{NODES} === 3")
        page.wait_for("document.querySelector('#drawing [data-id=\"2\"].waiting')")
        assert state_of(page, 0) == "reading"
        # Two curves, both from the parent.
        assert (
            page.evaluate("document.querySelector('.edge.after').getAttribute('d')").count("M") == 2
        )
        assert "waits for 0" in text(page, '#drawing [data-id="1"]')
        page.wait_for("document.getElementById('in-flight-of').textContent === 'partition 0'")
        assert text(page, "#subtitle").startswith("consumer shop · v2-token · 3 partitions")


def test_a_partition_that_was_never_caught_up_is_not_nobody(
    page: Browser, feedapi_publisher_factory: Callable[..., Publisher]
) -> None:
    publisher = feedapi_publisher_factory(2)
    publisher.append(1, {"n": 1})

    async def hang(batch: Batch) -> None:
        if batch.events:
            await anyio.sleep_forever()

    with scenes.running({scenes.consume(publisher): hang}) as url:
        page.open(url)
        page.wait_for("document.getElementById('in-flight-of').textContent === 'partition 1'")
        page.wait_for("document.getElementById('caught-up').textContent === '50 %'")
        assert text(page, "#behind-of") == "1 not caught up so far"


def test_it_is_updated_live(
    page: Browser, feedapi_publisher_factory: Callable[..., Publisher]
) -> None:
    publisher = feedapi_publisher_factory(2)
    consumer = scenes.consume(publisher)
    with scenes.running({consumer: scenes.handle_at_once}) as url:
        page.open(url)
        page.wait_for(f"{NODES} === 2")
        page.wait_for("document.getElementById('caught-up').textContent === '100 %'")
        publisher.extend(0, [{"n": n} for n in range(30)])
        page.wait_for("document.getElementById('events-total').textContent.startsWith('30 ')")
        publisher.split(1, method="cursor-from")
        page.wait_for(f"{NODES} === 4")
        page.wait_for("document.querySelector('#drawing .superseded')")
        assert (
            page.evaluate("document.querySelector('.edge.cursor').getAttribute('d')").count("M")
            == 2
        )


@pytest.mark.parametrize(("partitions", "tier"), [(3, "card"), (300, "chip"), (3000, "dot")])
def test_it_draws_any_number_of_partitions(
    page: Browser,
    feedapi_publisher_factory: Callable[..., Publisher],
    partitions: int,
    tier: str,
) -> None:
    publisher = feedapi_publisher_factory(partitions - 2)
    publisher.split(0)
    consumer = scenes.consume(publisher)
    with scenes.running({consumer: scenes.handle_at_once}) as url:
        page.open(url)
        page.wait_for(f"{NODES} === {partitions}")
        assert page.evaluate("document.getElementById('drawing').getAttribute('class')") == tier
        # Nothing overlaps, and the drawing fits into the width of the page.
        boxes = page.evaluate(
            "[...document.querySelectorAll('#drawing .node')].map(n => n.getAttribute('transform'))"
        )
        assert len(set(boxes)) == partitions
        assert page.evaluate(
            "document.getElementById('drawing').clientWidth"
            " <= document.getElementById('lineage').clientWidth"
        )


@pytest.mark.parametrize("generations", [1, 4, 10])
def test_it_fits_into_the_width_of_a_telephone(
    page: Browser, feedapi_publisher_factory: Callable[..., Publisher], generations: int
) -> None:
    publisher = feedapi_publisher_factory(2)
    for _ in range(generations):
        publisher.split(publisher.open_partitions()[-1])
    consumer = scenes.consume(publisher)
    page.resize(400, 900)
    with scenes.running({consumer: scenes.handle_at_once}) as url:
        page.open(url)
        page.wait_for(f"{NODES} === {2 + 2 * generations}")
        places = page.evaluate(
            "(left => [...document.querySelectorAll('#drawing .node .box')]"
            ".map(n => n.getBoundingClientRect()).map(b => [b.left - left, b.right - left, b.top]))"
            "(document.getElementById('lineage').getBoundingClientRect().left)"
        )
        room = page.evaluate("document.getElementById('lineage').clientWidth")
        assert all(left >= 0 and right <= room for left, right, _ in places), places
        assert len({(left, top) for left, _, top in places}) == len(places)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_a_stuck_handler_is_shown_with_its_partition(page: Browser) -> None:
    with scenes.stuck() as url:
        page.open(url)
        page.wait_for("document.querySelector('#drawing [data-id=\"3\"].trouble')")
        page.wait_for("document.querySelector('#problems').textContent.includes('handler-stuck')")
        page.wait_for("document.querySelector('#drawing [data-id=\"2\"].retrying')")
        page.wait_for("document.querySelector('#quarantine-rows tr')")
        assert "KeyError" in text(page, "#quarantine-rows")
        # What needs attention comes first.
        assert page.evaluate("document.querySelector('#rows td').textContent") == "3"


def test_the_table_can_be_filtered_and_a_partition_chosen(
    page: Browser, feedapi_publisher_factory: Callable[..., Publisher]
) -> None:
    consumer = scenes.consume(feedapi_publisher_factory(80))
    with scenes.running({consumer: scenes.handle_at_once}) as url:
        page.open(url)
        page.wait_for("document.querySelectorAll('#rows tr').length === 50")
        page.evaluate("document.getElementById('more').click()")
        assert page.evaluate("document.querySelectorAll('#rows tr').length") == 80
        page.evaluate(
            "(f => { f.value = '77'; f.dispatchEvent(new Event('input')) })"
            "(document.getElementById('filter'))"
        )
        assert page.evaluate("document.querySelectorAll('#rows tr').length") == 1
        page.evaluate(
            "document.querySelector('#drawing [data-id=\"77\"]')"
            ".dispatchEvent(new MouseEvent('click'))"
        )
        assert page.evaluate("document.querySelector('#rows tr').className") == "chosen"


def test_r21_texts_from_elsewhere_are_shown_as_text(
    page: Browser, feedapi_publisher_factory: Callable[..., Publisher]
) -> None:
    consumer = scenes.consume(feedapi_publisher_factory(), name=HOSTILE)

    async def handle(batch: Batch) -> None:
        consumer._session.iteration.report(0, HOSTILE)  # type: ignore[union-attr]

    with scenes.running({consumer: handle}) as url:
        page.open(url)
        page.wait_for("document.getElementById('subtitle').textContent.includes('<img')")
        assert "\\u202e" in text(page, "#subtitle")
        assert "\u202e" not in text(page, "body")
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert page.evaluate("document.title") != "1"


def test_several_consumers_each_have_a_tab(
    page: Browser, feedapi_publisher_factory: Callable[..., Publisher]
) -> None:
    consumers = {
        scenes.consume(feedapi_publisher_factory(n), name=f"c{n}"): scenes.handle_at_once
        for n in (1, 2)
    }
    with scenes.running(consumers) as url:
        page.open(url)
        page.wait_for(f"{NODES} === 1")
        page.evaluate("document.querySelectorAll('#consumers button')[1].click()")
        page.wait_for(f"{NODES} === 2")


def test_instances_that_share_a_feed_are_shown_with_their_partitions(page: Browser) -> None:
    with scenes.shared() as url:
        page.open(url)
        page.wait_for(
            "[...document.querySelectorAll('#owner-rows b')]"
            ".map((each) => each.textContent).join() === '4 partitions,4 partitions'"
        )
        names = page.evaluate(
            "[...document.querySelectorAll('#owner-rows span')].map((each) => each.textContent)"
        )
        assert [name.split("-")[0] for name in sorted(names)] == ["bergen", "oslo"]
        owned = (
            "[...document.querySelectorAll('#table td.owned')]"
            ".filter((cell) => cell.textContent.startsWith('oslo')).length"
        )
        assert page.evaluate(owned) == 4
        # An owner is found by the filter, too.
        page.evaluate("document.getElementById('filter').value = 'bergen'")
        page.evaluate("document.getElementById('filter').dispatchEvent(new Event('input'))")
        page.wait_for(f"{owned} === 0")


def test_it_says_when_nobody_answers(
    chromium: Browser, feedapi_publisher_factory: Callable[..., Publisher]
) -> None:
    consumer = scenes.consume(feedapi_publisher_factory())
    with scenes.running({consumer: scenes.handle_at_once}) as url:
        chromium.open(url)
        chromium.wait_for(f"{NODES} === 1")
    chromium.wait_for("!document.getElementById('offline').hidden")
    chromium.open("about:blank")
    chromium.complaints.clear()


def layout(page: Browser, partitions: list[dict[str, Any]], width: int = 1200) -> Any:
    """What the script of the layout makes of partitions."""
    return page.evaluate(
        f"import('/layout.js').then(m => {{ const l = m.layout({json.dumps(partitions)}, {width});"
        " return {...l, nodes: [...l.nodes]}; })"
    )


def test_a_chain_and_a_tree_of_thousands_are_drawn_from_left_to_right(
    page: Browser, feedapi_publisher_factory: Callable[..., Publisher]
) -> None:
    consumer = scenes.consume(feedapi_publisher_factory())
    with scenes.running({consumer: scenes.handle_at_once}) as url:
        page.open(url)
        page.wait_for(f"{NODES} === 1")
        chain = [{"id": 0}, *({"id": n, "starts_after": n - 1} for n in range(1, 2000))]
        places = dict(map(tuple, layout(page, chain)["nodes"]))
        assert all(places[n]["x"] > places[n - 1]["x"] for n in range(1, 2000))
        tree = [{"id": 0}, *({"id": n, "starts_after": (n - 1) // 2} for n in range(1, 3000))]
        drawn = layout(page, tree)
        places = dict(map(tuple, drawn["nodes"]))
        assert all(places[n]["x"] > places[(n - 1) // 2]["x"] for n in range(1, 3000))
        assert len({(place["x"], place["y"]) for place in places.values()}) == 3000
        assert drawn["height"] < 3000
