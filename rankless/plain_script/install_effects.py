"""Install what lets a script in the logical view touch everything outside its process as one process would."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from rankless.plain_script.effects_on_first_rank import EffectRanks, Effects
from rankless.plain_script.equal_sources import EqualSources
from rankless.plain_script.file_effects import FileEffects
from rankless.plain_script.logical_tensor_writers import LibraryWriters
from rankless.plain_script.native_library_files import LibraryFiles
from rankless.plain_script.process_effects import ProcessEffects


class InstalledEffects:
    """What surrounds the script of a rank.

    Args:
        rank: The rank.
        join: Joins the other ranks. Called at the script's first effect.
        seed: The seed of the run.
        ignored: Beginnings of paths whose changes are nobody's effects.
        has_hosts: Whether the ranks are on several hosts.
        notify: Tells the user.
    """

    def __init__(
        self,
        rank: int,
        join: Callable[[], EffectRanks],
        notify: Callable[[str], None],
        *,
        seed: int,
        ignored: Sequence[str],
        has_hosts: bool,
    ) -> None:
        self.effects = Effects(rank, join)
        self._files = FileEffects(self.effects, ignored, seed=seed, has_hosts=has_hosts)
        self._library_files = LibraryFiles(self.effects, self._files, notify)
        self._processes = ProcessEffects(self.effects)
        self._sources = EqualSources(self.effects, seed)
        self._patches = self._list_patches()
        """By the name of a module: what to do once the script has imported it."""

    @property
    def patched(self) -> Sequence[str]:
        """The names of modules that `patch` waits for."""
        return tuple(self._patches)

    def patch(self, name: str) -> None:
        """Change a module of this name that the script has just imported, if it needs that and has not been changed."""
        module = sys.modules.get(name)
        for change in self._patches.pop(name, ()) if module is not None else ():
            change(module)

    def _list_patches(self) -> dict[str, Sequence[Callable[[Any], None]]]:
        sources = {"torch": self._sources.watch_torch, "numpy.random": self._sources.watch_numpy}
        patches = (LibraryWriters(self.effects, self._files).patches, self._library_files.patches, sources)
        names = {name for each in patches for name in each}
        return {name: [each[name] for each in patches if name in each] for name in names}

    def install(self, *, shares_input: bool) -> None:
        """Replace Python's functions until this process ends, and standard input if ranks share it."""
        self._sources.install()
        self._files.install()
        self._library_files.install()
        self._processes.install(shares_input=shares_input)

    def finish(self) -> None:
        """Note that the script has ended without an error, on all ranks."""
        self.effects.finish()

    def end(self) -> None:
        """Leave everything to this process from now on: its script has failed, and other ranks may wait elsewhere."""
        self.effects.end()
