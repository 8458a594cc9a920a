import pytest

from unirl.demo.arith import make_base_model


@pytest.fixture(scope="session")
def base_model(tmp_path_factory):
    """The demo's base model after a few steps of its warm start: it knows nothing, but every part is real."""
    path = tmp_path_factory.mktemp("models") / "deep" / "arith"
    make_base_model(str(path), careful_steps=3, lazy_steps=2)
    return path
