"""The version of this package, and the newest transformers that it was tested with, each in one place."""

import warnings

import transformers
from packaging.version import Version

__version__ = "0.1.0"
#: The one that constraints.txt pins.
NEWEST_TESTED_TRANSFORMERS = "5.24.0"


def warn_of_untested_transformers() -> None:
    """Warn if the installed transformers is newer than the newest that was tested."""
    installed = transformers.__version__
    if Version(installed) > Version(NEWEST_TESTED_TRANSFORMERS):
        warnings.warn(
            f"transformers {installed} is newer than {NEWEST_TESTED_TRANSFORMERS}, the newest that hf-rfa {__version__} was "
            f'tested with. If something fails, run pip install "transformers=={NEWEST_TESTED_TRANSFORMERS}".',
            stacklevel=2,
        )
