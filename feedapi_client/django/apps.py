"""The configuration of the app."""

from __future__ import annotations

from django.apps import AppConfig


class FeedAPIConfig(AppConfig):
    name = "feedapi_client.django"
    label = "feedapi"
    verbose_name = "FeedAPI"
