"""Left out where transformers is older than these tests need; a warning says so."""

import warnings

try:
    import torch_mpk.continuous_batching  # noqa: F401
except ImportError as error:
    warnings.warn(f"tests/continuous_batching is left out: {error}", stacklevel=1)
    collect_ignore_glob = ["test_*.py"]
