"""Triton's interpreter in half the time.

For every call of a device function it walks the whole language again, to replace what the launch has already replaced.
"""

import inspect
from typing import Any


def spare_repeated_patches() -> None:
    """From now on, in this process. Other versions of Triton are left as they are."""
    from triton.runtime import interpreter

    patch, scope = (getattr(interpreter, name, None) for name in ("_patch_lang", "_LangPatchScope"))
    if patch is None or scope is None or hasattr(patch, "spares"):
        return
    language = interpreter.tl
    rooms: dict[Any, list[Any]] = {}  # parts of the language that a function sees

    def patch_what_is_not(function: Any) -> Any:
        if function not in rooms:
            seen = [value for value in function.__globals__.values() if inspect.ismodule(value)]
            rooms[function] = [value for value in seen if value in (language, language.core)]
        if any(language.core.is_builtin(room.load) for room in rooms[function]):
            return patch(function)
        return scope()

    patch_what_is_not.spares = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_what_is_not
