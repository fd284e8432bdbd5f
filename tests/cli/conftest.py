import pytest
from neap_command import Workspace, binary


@pytest.fixture
def workspace(tmp_path):
    assert binary().exists(), f"{binary()} is missing; build it, or name it in NEAP_BIN"
    return Workspace(tmp_path)
