"""Consume a feed beside Django, exactly once: the ORM's writes and the cursor in one transaction.

A project has these parts in files of their own: the settings, the model, and the management
command. Here they are one program, with a file of SQLite.

python examples/django_orders.py [URL]
"""

# ruff: noqa: E402, D101, D106 - Django takes its settings before anything else is imported

import sys
from contextlib import nullcontext

import django
from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "django_orders.db"}},
    INSTALLED_APPS=["feedapi_client.django"],
)
django.setup()

from django.core.management import call_command
from django.db import connection, models

from feedapi_client import SyncBatch
from feedapi_client.django.command import ConsumeCommand
from feedapi_client.testing import Publisher


class Order(models.Model):
    n = models.IntegerField()

    class Meta:
        app_label = "orders"
        db_table = "orders"


class Command(ConsumeCommand):
    help = "Write an order for each event of the feed."

    def apply(self, batch: SyncBatch) -> None:
        """Write the effects; the cursor is saved in the same transaction."""
        for event in batch:
            print(Order.objects.create(n=event.json()["n"]).n)


def main(url: str) -> None:
    call_command("migrate", verbosity=0)
    if Order._meta.db_table not in connection.introspection.table_names():
        with connection.schema_editor() as editor:
            editor.create_model(Order)
    command = Command()
    command.url = url
    call_command(command, once=True)
    print(f"{Order.objects.count()} orders")


if __name__ == "__main__":
    publisher = Publisher(1, page_size=5, checkpoint_every=5)
    publisher.extend(0, [{"n": n} for n in range(12)])
    with nullcontext(sys.argv[1]) if len(sys.argv) > 1 else publisher.serve() as url:
        main(url)
