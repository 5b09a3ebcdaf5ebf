"""What the tests of checkpoints share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def reports() -> Iterator[list[str]]:
    """What is logged in this process."""
    messages: list[str] = []
    log = logging.getLogger("dtron")

    def listen(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return True

    log.addFilter(listen)
    yield messages
    log.removeFilter(listen)
