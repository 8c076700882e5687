"""An integration whose package is missing says in one line which extra brings it."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import pytest

from streamadv.errors import MissingDependencyError


@pytest.mark.skipif(find_spec("trl") is not None, reason="trl is installed")
def test_trl() -> None:
    message = r"^streamadv.integrations.trl needs trl(, accelerate)?: pip install 'streamadv\[trl\]'$"
    with pytest.raises(MissingDependencyError, match=message):
        importlib.import_module("streamadv.integrations.trl")


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is installed")
def test_verl() -> None:
    message = r"^streamadv.integrations.verl needs verl, transfer_queue: pip install 'streamadv\[verl\]'$"
    with pytest.raises(MissingDependencyError, match=message):
        importlib.import_module("streamadv.integrations.verl")


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_ray() -> None:
    message = r"^streamadv.integrations.ray needs ray: pip install 'streamadv\[ray\]'$"
    with pytest.raises(MissingDependencyError, match=message):
        importlib.import_module("streamadv.integrations.ray")
