"""What is wrong, one line each, gathered without stopping at the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fused_logp_hub._errors import FusedLogpError


class Problems(list[str]):
    """The lines; `step` adds one for what a block raises, so that the rest is still looked at."""

    def add(self, message: str) -> None:
        line = " ".join(message.split("\n", 1)[0].split())
        if line not in self:  # a damaged file is met once by its check and once by each use
            self.append(line)

    @contextmanager
    def step(self, subject: str) -> Iterator[None]:
        """The package's own errors are added as they are, any other with its subject and type."""
        try:
            yield
        except FusedLogpError as error:
            self.add(str(error))
        except Exception as error:
            self.add(f"{subject}: expected success, got {type(error).__name__}: {error}")
