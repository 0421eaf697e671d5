"""A QCOM device that a test opens and closes, so that several of them, on different virtual machines, may follow each other in one process."""
from __future__ import annotations
import contextlib, gc
from collections.abc import Iterator
from typing import Any
from tinygrad.device import Device
from tinygrad.engine import realize
from tinygrad.helpers import Context
from tinygrad.runtime import ops_qcom
from tinygrad.runtime.support import hcq2

def forget_qcom() -> None:
  """Drops what tinygrad keeps for a device of that name, as it expects one to live as long as the process."""
  for cache in (hcq2.hcq_compile_cache, hcq2.link_buf_cache, hcq2.link_linear_cache, ops_qcom.programs, realize.local_size_cache): cache.clear()
  for key in [k for k in realize.runtime_cache if k[1] == "QCOM"]: del realize.runtime_cache[key]
  gc.collect()

class _Opened:
  """Device["QCOM"] while a test runs. Buffers that outlive their device (a failed test's traceback holds some) are never freed into the next one."""
  def __init__(self) -> None: self.dev: Any = None
  def __enter__(self) -> Any:
    forget_qcom()
    self.dev = dev = ops_qcom.QCOMDevice("QCOM")
    free = dev.allocator.free
    dev.allocator.free = lambda opaque, size, options=None: free(opaque, size, options) if opaque.owner is dev else None
    return dev
  def __exit__(self, *exc: object) -> None:
    # an error nobody waited for is not the next test's
    with contextlib.suppress(RuntimeError): self.dev.synchronize()
    forget_qcom()
    self.dev.iface.close()
    self.dev = None

_current: list[_Opened] = []
_find = type(Device)._Device__get_canonicalized_item # type: ignore[attr-defined]
def _lookup(self: Any, name: str) -> Any:
  return _current[-1].dev if name == "QCOM" and _current and _current[-1].dev is not None else _find(self, name)
type(Device)._Device__get_canonicalized_item = _lookup # type: ignore[attr-defined]

@contextlib.contextmanager
def opened(target: str, ifaces: list[type] | None = None) -> Iterator[Any]:
  """QCOM opened as DEV=`target` would, as Device["QCOM"] and the default device. `ifaces` replaces the interfaces that are tried."""
  old, ops_qcom.QCOMDevice.ifaces = ops_qcom.QCOMDevice.ifaces, ifaces or ops_qcom.QCOMDevice.ifaces
  slot = _Opened()
  try:
    with Context(DEV=target):
      _current.append(slot)
      with slot as dev: yield dev
  finally:
    _current.pop()
    ops_qcom.QCOMDevice.ifaces = old

@contextlib.contextmanager
def virtual(kind: str, **settings: Any) -> Iterator[tuple[Any, Any]]:
  """(virtual machine, device) with `kind` MSM or KGSL, booted with `settings` (see test.mockgpu.qcom.Config)."""
  from test.mockgpu import qcom
  machine = qcom.configure(**settings)
  with opened(f"MOCK{kind}+QCOM:IR3") as dev: yield machine, dev
