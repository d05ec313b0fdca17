import os

import pytest

from tests.support.federations import Federation, alive, descendants, listening, wait_for


@pytest.fixture
def federation(tmp_path):
    """A federation of one site; nothing of it is left afterwards."""
    made = Federation(tmp_path)
    yield made
    started = descendants(os.getpid())
    made.stop()
    wait_for(lambda: not alive(started), 10, "the end of all processes")
    assert made.link.port not in listening()
