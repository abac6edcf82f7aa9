"""The laws, tests that every connection passes, for methods of other packages too: see `laws`."""
