"""The server of ``python -m torch_mpk serve``: see docs/serving.md."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

from torch_mpk.errors import EngineError, MissingPackageError
from torch_mpk.serve.interrupts import end_the_process

PACKAGES = {"fastapi": "0.115", "uvicorn": "0.30", "openai": "2.0", "prometheus_client": "0.20"}


def run(arguments: Sequence[str]) -> None:
    """The command, with its arguments, until it is stopped.

    Raises:
        MissingPackageError: it lacks a package.
        EngineError: ``torchrun`` has started several processes.
    """
    with end_the_process():
        ranks = os.environ.get("WORLD_SIZE") or "1"
        if ranks != "1":
            raise EngineError(
                f"the server has a whole model in one process, and WORLD_SIZE is {ranks}: start it without torchrun. "
                "torch_mpk.generate takes models that are shared out to ranks"
            )
        for package, version in PACKAGES.items():
            if importlib.util.find_spec(package) is None:
                raise MissingPackageError(name="serve", package=package, version=version, found="none")
        import torch_mpk.continuous_batching  # noqa: F401 - which says so where transformers is too old
        from torch_mpk.serve.server import command

        command(arguments)
