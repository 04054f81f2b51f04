"""Processes that must not outlive the one that started them."""

import os
import threading
import time

_SECONDS = 0.5  # between two looks


def end_with(parent: int) -> None:
    """End this process soon after `parent`, its parent, is gone, however that ended.

    Ranks whose torchrun was killed would go on without it and keep the folder of their run; processes of a pool would
    wait for work for ever.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
