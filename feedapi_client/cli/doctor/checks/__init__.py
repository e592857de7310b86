"""The checks of ``feedapi doctor``. `table` has all of them, the other modules do them."""
