"""The migrations of the app ``feedapi``."""
