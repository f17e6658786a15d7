"""Runs that go on where they were stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp


class Checkpoint:
    """The newest state of one run, in a directory.

    Args:
        path: the directory; it is made where it is missing.
        every: calls of the compiled step between two saves.
    """

    def __init__(self, path: Path, every: int = 100):
        options = ocp.CheckpointManagerOptions(max_to_keep=1, save_interval_steps=every)
        self._manager = ocp.CheckpointManager(path.absolute(), options=options)

    def restore(self, state: Any) -> tuple[int, Any]:
        """The calls made and the state after them; none and `state` where nothing was saved."""
        calls = self._manager.latest_step()
        if calls is None:
            return 0, state
        return calls, self._manager.restore(calls, args=ocp.args.StandardRestore(state))

    def save(self, calls: int, state: Any, last: bool) -> None:
        """Saves the state after so many calls, where it is time to or these are the last."""
        if calls != self._manager.latest_step():
            self._manager.save(calls, args=ocp.args.StandardSave(state), force=last)
            self._manager.wait_until_finished()  # the next call takes the state's own memory
