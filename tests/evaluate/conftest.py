import logging
import socket

import pytest


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Nothing here may reach for the network."""

    def refuse(*_):
        raise AssertionError("an attempt to use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
