"""Whether banks reach the disk: known from the last write, said once when it changes.

Knows no files. Event loop.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Condition:
    """`detail` says why banks cannot be written; "" while they can be."""

    def __init__(self) -> None:
        self.detail = ""

    def failed(self, detail: str) -> None:
        """A write did not reach the disk, through no fault of the bank's."""
        if not self.detail:
            log.error("banks are not written any more; reading goes on detail=%s", detail)
        self.detail = detail

    def worked(self) -> None:
        """The disk took a write."""
        if self.detail:
            log.warning("banks are written again after detail=%s", self.detail)
        self.detail = ""
