"""The bare shader core as a tinygrad device, `IR3CORE`: tinygrad compiles with Mesa's IR3 compiler, the native engine runs the code.

No kernel interface, no command processor: kernel arguments are laid out here as the compiler's metadata says, so that tests of the shader core
can run any tinygrad program and compare it with numpy.
"""
from __future__ import annotations
import dataclasses, struct, sys, types
from typing import Any
import numpy as np
from test.mockgpu.qcom.memory import BoInfo, Space
from test.mockgpu.qcom.ir3.native import Dispatch, Engine

ARCH = "a630"
PAGE, CONST_BYTES = 4096, 2048

class Memory:
  """One address space; buffers sit far apart, so that running off one of them faults."""
  def __init__(self, uche: bool = False):
    self.space, self.next = Space(uche=uche), 0x1_0000_0000
    self.keep: dict[int, np.ndarray] = {}

  def alloc(self, size: int, name: str = "") -> int:
    raw = np.zeros(-(-size // PAGE) * PAGE + PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE
    mem = raw[start:start + -(-size // PAGE) * PAGE]
    iova, self.next = self.next, self.next + mem.size + 0x10000
    self.space.map(iova, mem.size, mem.ctypes.data, bo=BoInfo(name=name, size=size))
    self.keep[iova] = mem
    return iova

  def free(self, iova: int) -> None:
    self.space.unmap(iova)
    del self.keep[iova]

  def view(self, iova: int, size: int) -> np.ndarray:
    base = next(b for b, m in self.keep.items() if b <= iova < b + m.size)
    return self.keep[base][iova - base:iova - base + size]

def image_descriptor(iova: int, shape: tuple[int, ...], itemsize: int, swizzle: bool) -> bytes:
  """A linear 2-D four channel descriptor, 16 dwords: rows of shape[1] texels."""
  pitch = shape[1] * 4 * itemsize
  d0 = (130 if itemsize == 4 else 98) << 22 | (0o3210 << 4 if swizzle else 0)
  return struct.pack("<16I", d0, shape[1] | shape[0] << 15, pitch << 7 | 1 << 29, 0, iova & 0xffffffff, iova >> 32, *[0] * 10)

class Kernel:
  """A compiled program of tinygrad's IR3 renderer and how to launch it on an Engine."""
  def __init__(self, lib: bytes, signature: tuple = ()):
    from tinygrad.runtime.autogen import mesa
    from tinygrad.runtime.support.compiler_mesa import IR3Compiler
    v, cs, self.immediates, self.code = IR3Compiler.unpack_lib(lib)
    self.signature, self.v = signature, v
    self.buf_off, self.imm_off = cs.ubo_state.range[0].offset, cs.allocs.max_const_offset_vec4 * 16
    self.wgid, self.lid, self.local_bytes, self.pvt = v.cs.work_group_id, v.cs.local_invocation_id, v.shared_size, v.pvtmem_size
    self.full_regs, self.half_regs, self.branchstack = v.info.max_reg + 1, v.info.max_half_reg + 1, -(-v.branchstack // 2)  # as turnip has it
    self.ntex, self.nuav = v.image_mapping.num_tex, v.num_uavs - v.image_mapping.num_tex
    self.tex_to_image = list(v.image_mapping.tex_to_image)
    assert not cs.allocs.consts[mesa.IR3_CONST_ALLOC_DRIVER_PARAMS].size_vec4, "driver parameters are not laid out here"

  def dispatch(self, space: Space, groups: tuple, local: tuple, bufs: list[int], scalars: tuple[tuple[int, Any], ...] = (),
               images: list[tuple[int, tuple, int]] | None = None, **kw: Any) -> Dispatch:
    """bufs: addresses of the non-image buffers; scalars: (value, dtype); images: (address, shape, itemsize) in signature order."""
    raw, valid = bytearray(4096), np.zeros(1024, bool)
    at = self.buf_off
    for addr in bufs:
      raw[at:at + 8] = struct.pack("<Q", addr)
      valid[at // 4:at // 4 + 2], at = True, at + 8
    for value, dt in scalars:
      at = -(-at // dt.itemsize) * dt.itemsize
      raw[at:at + dt.itemsize] = struct.pack("<" + dt.fmt, value)
      valid[at // 4:-(-(at + dt.itemsize) // 4)], at = True, at + dt.itemsize
    raw[self.imm_off:self.imm_off + len(self.immediates)] = self.immediates
    valid[self.imm_off // 4:(self.imm_off + len(self.immediates)) // 4] = True
    images = images or []
    uavs = [image_descriptor(a, s, n, False) for a, s, n in images[:self.nuav]]
    tex = [image_descriptor(*images[self.nuav + self.tex_to_image[k]], True) for k in range(self.ntex)]
    return Dispatch(groups=groups, local=local, consts=np.frombuffer(bytes(raw), np.uint32), const_valid=valid, space=space, wgid_reg=self.wgid,
                    lid_reg=self.lid, full_regs=self.full_regs, half_regs=self.half_regs, merged_regs=bool(self.v.mergedregs),
                    branchstack=self.branchstack, local_bytes=self.local_bytes, pvt_bytes=-(-self.pvt // 512) * 512, textures=tex, uavs=uavs, **kw)

log: list[tuple[Kernel, Dispatch, str]] = []          # what ran, when `record` is set
options: dict[str, Any] = {"record": False, "order": "forward"}
memory = Memory()
_engine: list[Engine] = []

def engine() -> Engine:
  """The engine of this process."""
  if not _engine: _engine.append(Engine())
  return _engine[0]

def register(arch: str = ARCH) -> str:
  """Makes the device known to tinygrad and returns its name. `arch` may carry IMAGE_PITCH_ALIGNMENT."""
  name = "IR3IMG" if "," in arch else "IR3CORE"
  if (mod := f"tinygrad.runtime.ops_{name.lower()}") in sys.modules: return name
  from tinygrad.device import Allocator, Compiled, Device as Devices
  from tinygrad.helpers import DEV, is_image_shape
  from tinygrad.renderer.nir import IR3Renderer

  class CoreAllocator(Allocator):
    def _alloc(self, size: int, options: Any) -> int: return memory.alloc(size)
    def _free(self, opaque: int, options: Any) -> None:
      if opaque in memory.keep: memory.free(opaque)
    def _copyin(self, dest: int, src: memoryview) -> None: memory.view(dest, len(src))[:] = np.frombuffer(src, np.uint8)
    def _copyout(self, dest: memoryview, src: int) -> None: np.frombuffer(dest, np.uint8)[:] = memory.view(src, len(dest))
    def _offset(self, buf: int, size: int, offset: int) -> int: return buf + offset

  class CoreProgram:
    def __init__(self, dev: Any, obj: Any):
      self.kernel, self.name, self.device, self.profile_key = Kernel(obj.lib, obj.signature), obj.name, dev.device, obj.profile_key
      self.program = engine().program(self.kernel.code, merged_regs=self.kernel.v.mergedregs)

    def __call__(self, *bufs: int, global_size: tuple = (1, 1, 1), local_size: tuple = (1, 1, 1), vals: tuple = (), wait: bool = False,
                 **kw: Any) -> float:
      sig = self.kernel.signature
      plain = [bufs[slot] for _, slot, _, shape in sig if slot < len(bufs) and not is_image_shape(shape)]
      images = [(bufs[slot], shape, dt.itemsize) for _, slot, dt, shape in sig if slot < len(bufs) and is_image_shape(shape)]
      d = self.kernel.dispatch(memory.space, tuple(global_size), tuple(local_size), plain,
                               tuple((v, dt) for v, (_, _, dt, _) in zip(vals, sig[len(bufs):])), images, order=options["order"])
      if options["record"]: log.append((self.kernel, d, self.name))
      engine().run(self.program, d)
      return 1e-3

  class Device(Compiled):
    def __init__(self, device: str):
      super().__init__(device, CoreAllocator(self), [IR3Renderer], CoreProgram, None, arch=arch)
      # tinygrad makes images only for devices of certain names
      self.cached_renderer[None] = IR3Renderer(dataclasses.replace(DEV.target("QCOM"), renderer="IR3", arch=arch))
    @property
    def renderer(self) -> Any: return self.cached_renderer[None]

  Device.__name__ = f"{name.capitalize()}Device"
  module = types.ModuleType(mod)
  setattr(module, Device.__name__, Device)
  Device.__module__ = mod
  sys.modules[mod] = module
  if name not in Devices._devices: Devices._devices.append(name)
  return name

__all__ = ["Kernel", "Memory", "engine", "log", "memory", "options", "register"]
