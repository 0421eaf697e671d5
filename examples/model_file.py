"""Files of captured models: a line of JSON that says what is in them, then a pickle whose buffers lie outside of it, one after the other.

    save("out.pkl", jit, about)          about: what a reader has to know, as JSON; the target device is added
    jit, about = load("out.pkl")         refuses in one sentence where the model does not run
    out = jit(**tensors(about["inputs"], {"x": array}))

Layout: MAGIC, JSON, newline; for each buffer its length and its bytes; the pickle; two u64 at the end, the pickle's offset and the number of buffers.
Like every pickle such a file can run code when it is loaded: load your own only.
"""
from __future__ import annotations
import json, mmap, os, pathlib, pickle, struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO
import numpy as np
from tinygrad import Device, Tensor

MAGIC, U64, END = b"tinygrad-capture 2\n", struct.Struct("<Q"), struct.Struct("<QQ")

def target() -> dict[str, str]:
  """The default device as a file names it: compiled code is for one device, one compiler's conventions and one GPU."""
  dev: Any = Device[Device.DEFAULT]
  return {"device": Device.DEFAULT.split(":")[0], "renderer": type(dev.renderer).__name__.removesuffix("Renderer"), "gpu": dev.arch.split(",")[0]}

def save(path: str | os.PathLike[str], jit: Any, about: dict[str, Any]) -> int:
  """Writes a captured TinyJit and returns the file's size in bytes. The file appears whole or not at all; one buffer at a time is in memory."""
  path = pathlib.Path(path)
  part, count = path.with_name(path.name + ".part"), 0
  try:
    with open(part, "wb") as f:
      f.write(MAGIC + json.dumps({**about, "target": target()}).encode() + b"\n")
      def out_of_band(buffer: pickle.PickleBuffer) -> None:
        nonlocal count
        with buffer.raw() as raw:
          f.write(U64.pack(raw.nbytes))
          f.write(raw)
        buffer.release()
        count += 1
      stream = pickle.dumps(jit, protocol=5, buffer_callback=out_of_band)
      at = f.tell()
      f.write(stream + END.pack(at, count))
    os.replace(part, path)
  finally: part.unlink(missing_ok=True)
  return path.stat().st_size

def about(f: BinaryIO, path: str) -> dict[str, Any]:
  if f.read(len(MAGIC)) != MAGIC: raise RuntimeError(f"{path} is no model file of this version: compile the model again")
  try: return json.loads(f.readline()) # type: ignore[no-any-return]
  except ValueError: raise RuntimeError(f"{path} is damaged: compile the model again") from None

def load(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
  """The captured TinyJit, with its weights in device memory, and what was said about it. Raises RuntimeError, before anything is loaded, where
  the default device is not the one the model was compiled for, and for a file that is damaged or of another version."""
  with open(path, "rb") as f:
    info = about(f, str(path))
    want, device = info["target"], Device.DEFAULT.split(":")[0]
    if device != want["device"] or (here := target()) != want:
      where = device if device != want["device"] else spell(here)
      dev = f"{want['device']}:{want['renderer'].removeprefix(want['device'])}"
      virtual = f", or DEV=MOCKMSM+{dev} where there is no Adreno" if want["renderer"] == "IR3" else ""
      raise RuntimeError(f"{path} was compiled for {spell(want)} and this process computes on {where}: run it with DEV={dev}{virtual}, "
                         "or compile the model again for this device")
    start = f.tell()
    with mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as data, memoryview(data) as view:
      try:
        at, count = END.unpack_from(view, len(view) - END.size)
        if not start <= at <= len(view) - END.size: raise ValueError(f"offset {at}")
        def buffers() -> Iterator[bytes]:
          pos = start
          for _ in range(count):
            n, = U64.unpack_from(view, pos)
            pos += U64.size + n
            if pos > at: raise ValueError(f"buffer of {n} bytes")
            yield view[pos - n:pos].tobytes()
        return pickle.loads(bytes(view[at:len(view) - END.size]), buffers=buffers()), info
      except (pickle.UnpicklingError, struct.error, ValueError, EOFError, AttributeError, ImportError, TypeError) as e:
        raise RuntimeError(f"{path} can't be loaded ({type(e).__name__}: {e}), it is damaged or of another tinygrad: compile the model again") from e

def tensors(inputs: Mapping[str, Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
  """What a captured model takes: each array on the device that `inputs`, of a file, names for it. One on NPY stays the memory of its array, which may
  be rewritten in place. Raises RuntimeError if an array is missing or unknown, the TinyJit for another shape or dtype."""
  if arrays.keys() != inputs.keys(): raise RuntimeError(f"the model's inputs are {', '.join(inputs)}, not {', '.join(arrays) or 'none'}")
  # halves come in as floats: the capture casts them
  wide = {n: a.astype(np.float32) if a.dtype == np.float16 else a for n, a in arrays.items()}
  return {n: Tensor(wide[n], device=i["device"]).realize() for n, i in inputs.items()}

def spell(t: dict[str, str]) -> str: return f"{t['device']} {t['gpu']} by {t['renderer']}"
