"""The seed and the settings of hf-rfa's own tests."""

from tests.conftest import _seed

__all__ = ["_seed"]
