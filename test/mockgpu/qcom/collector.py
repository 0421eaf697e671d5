"""Keeps the client's finalizers out of the virtual GPU.

Python collects garbage in whichever thread allocates. A collection on the GPU's thread, or inside an ioctl, would run finalizers of the client there:
one that frees a buffer wants the client's lock, held by a thread that waits for this very GPU. Neither a GPU nor a kernel runs code of its clients,
so a collection that starts inside `outside_python` finds nothing; a later one of the client's finds the same garbage.
"""
from __future__ import annotations
import gc, threading

class _Inside(threading.local):
  depth = 0

  def __enter__(self) -> None: self.depth += 1
  def __exit__(self, *exc: object) -> None: self.depth -= 1

outside_python = _Inside()     # as a context: what runs in it stands for hardware or a kernel

def _hide(phase: str, info: dict[str, int]) -> None:
  """Frozen objects are no candidates. Both calls only splice lists, whatever the number of objects; a freeze of the client's own is undone."""
  if outside_python.depth: (gc.freeze if phase == "start" else gc.unfreeze)()

gc.callbacks.append(_hide)
