"""Hang check, devcoredump, debugfs: msm_gpu.c's times and texts, IGT's msm_mapping, and the runtime under a kernel that kills by the clock."""
from __future__ import annotations
import ctypes, re, struct
from typing import Any
import numpy as np
import pytest
from test.mockgpu import qcom
from test.mockgpu.qcom.crash import ascii85
from test.mockgpu.qcom.gpu import Strict
from test.qcom_open import virtual
from test.virtual.kernel_client import READ, WRITE, Msm, boot
from test.virtual.rig import Stream
from tinygrad import Tensor

S = 10**9

# *** hang check, on a clock of the test's own

class Clock:
  def __init__(self) -> None: self.now = 100 * S + 1
  def __call__(self) -> int: return self.now

def hanging(kernel: str) -> tuple[Any, Any, Any, Clock]:
  clock = Clock()
  machine, gpu = boot(kernel=kernel, clock=clock, hangcheck=True)
  c = Msm()
  c.submit([(c.new(), READ)])
  return machine, gpu, c, clock

@pytest.mark.parametrize("kernel,moves,seconds", [("6.1", False, 1), ("6.1", True, 1), ("6.6", False, 2), ("6.6", True, 4), ("6.12", False, 2),
                                                  ("7.2", True, 4)])
def test_ticks_are_whole_seconds_and_progress_buys_three(kernel: str, moves: bool, seconds: int) -> None:
  """A tick a second after a submit at a whole one. 6.1 knows fences only. Since progress(), a CP that stands still is seen at the second tick, and
  one that moves has three more."""
  machine, gpu, c, clock = hanging(kernel)
  while not gpu.done:
    clock.now += 10_000_000
    gpu.position += moves
    machine.msm.hangcheck.tick()
    assert clock.now < 160 * S, "never"
  assert clock.now // 10_000_000 * 10_000_000 == (100 + seconds) * S, f"killed {clock.now / S - 100:.2f} s after the submit"
  assert (c.faults(), c.param(9)) == (1, 1)
  lines = [re.sub(r"^\[ *[\d.]+\] ", "", line) for line in machine.dmesg]
  device = "msm_dpu ae01000.display-controller: [drm:hangcheck_handler] *ERROR* 6.3.0.2: "
  assert lines[:3] == [device + "hangcheck detected gpu lockup rb 0!", device + "    completed fence: 0", device + "    submitted fence: 1"]
  assert "hangcheck recover!" in lines[3] and "offending task" in lines[4]
  c.close()

def test_a_fence_that_moves_resets_the_check() -> None:
  machine, gpu, c, clock = hanging("6.12")
  h = c.new()
  for _ in range(10):                                   # a chain of submits, each of which takes 0.9 s
    c.submit([(h, READ)])
    for _ in range(9):
      clock.now += S // 10
      machine.msm.hangcheck.tick()
    gpu.finish()
  assert [c.faults(), len(gpu.done)] == [0, 10] and not machine.dmesg
  gpu.finish(len(gpu.jobs))
  c.close()

def test_nothing_is_checked_when_nothing_is_queued() -> None:
  machine, gpu, c, clock = hanging("6.12")
  gpu.finish()
  for _ in range(100):
    clock.now += S // 10
    machine.msm.hangcheck.tick()
  assert machine.msm.hangcheck.due is None and c.faults() == 0
  c.close()

def test_the_runtime_under_a_kernel_that_kills_by_the_clock() -> None:
  """A CP that waits for ever: the check finds no progress, the runtime gets one error, the device goes on."""
  with virtual("MSM", hangcheck=True, hang_polls=10**9, strict=Strict(raise_to_waiter=False)) as (machine, dev):
    a = Tensor(np.arange(100, dtype=np.float32)).realize()
    (a + 1).numpy()
    c = Msm()                                           # another client holds the ring
    at, ib = c.iova(h := c.new()), c.new()
    cpu = c.mmap(ib)
    s = Stream().wait_mem(at, 1)
    ctypes.memmove(cpu, struct.pack(f"<{len(s.words)}I", *s.words), 4 * len(s.words))
    c.submit([(h, READ), (ib, READ)], [(1, 1, 0, 4 * len(s.words))], queue=c.queue(0))
    np.testing.assert_array_equal((a * 7).numpy(), np.arange(100) * 7)
    assert c.faults(1) == 1 and any("hangcheck detected gpu lockup" in line for line in machine.dmesg)
    assert dev.iface.lost() is None, "the hang was another client's"
    qcom.munmap(cpu, 4096)
    c.close()

# *** devcoredump and debugfs

@pytest.fixture
def client() -> Any:
  qcom.configure(strict=Strict(raise_to_waiter=False), hang_polls=50)
  c = Msm()
  c.target, c.cmds = c.new(), c.new()
  c.cpu, c.cs = c.mmap(c.target), c.mmap(c.cmds)
  yield c
  assert qcom.current().gpu.idle(20)
  c.close()
  for at in (c.cpu, c.cs): qcom.munmap(at, 4096)

def run(c: Any, s: Stream, flags: int = READ) -> None:
  ctypes.memmove(c.cs, struct.pack(f"<{len(s.words)}I", *s.words), 4 * len(s.words))
  c.wait(c.submit([(c.cmds, flags), (c.target, WRITE)], [(1, 0, 0, 4 * len(s.words))]).fence, 30)

def take_dump() -> str | None:
  """IGT's get_and_clear_devcore."""
  files = qcom.MockFileIOInterface
  if not files.exists(qcom.DEVCOREDUMP): return None
  text: str = files(qcom.DEVCOREDUMP).read()
  files(qcom.DEVCOREDUMP).write("1")
  assert not files.exists(qcom.DEVCOREDUMP)
  return text

def address_of(name: str) -> int:
  """IGT's get_bo_addr: the line behind the one that ends in the name. 0 if there is no such buffer."""
  lines = qcom.MockFileIOInterface(qcom.DEBUGFS_GEM).read().splitlines()
  for line, vma in zip(lines, lines[1:]):
    if line.split()[-1] == name:
      m = re.match(r"      vmas: \[gpu: aspace=[0-9a-f]+, ([0-9a-f]+),mapped,inuse=1\]|      vmas: \[gpu: vm=[0-9a-f]+, ([0-9a-f]+), mapped\]", vma)
      assert m is not None, vma
      return int(m[1] or m[2], 16)
  return 0

@pytest.mark.parametrize("kernel", ["6.12", "7.2"])
@pytest.mark.parametrize("name,write", [("ring0", True), ("sqefw", True), ("shadow", True), ("shadow", False)])
def test_igt_msm_mapping(client: Any, kernel: str, name: str, write: bool) -> None:
  """msm_mapping@ring, sqefw, shadow: a stream's access to a buffer of the kernel's is an SMMU fault, and the dump names its address."""
  if kernel == "7.2":
    client.close()
    qcom.configure(kernel="7.2", strict=Strict(raise_to_waiter=False))
    client.__init__()
    client.target, client.cmds = client.new(), client.new()
    for at in (client.cpu, client.cs): qcom.munmap(at, 4096)
    client.cpu, client.cs = client.mmap(client.target), client.mmap(client.cmds)
  addr = address_of(name)
  assert addr >= 1 << 48 and take_dump() is None
  at = client.iova(client.target)
  run(client, Stream().mem_write(addr, 0x123) if write else Stream().pkt7(0x73, 0, at, at >> 32, addr, addr >> 32))
  dump = take_dump()
  assert [v.kind for v in qcom.current().gpu.reports] == ["privileged" if name == "shadow" else "readonly"]
  assert dump is not None and "fault-info" in dump
  m = re.search(r"  - iova=([0-9a-f]+)", dump)
  assert m is not None and int(m[1], 16) == addr and "type=PERMISSION" in dump and f"dir={'WRITE' if write else 'READ'}" in dump

@pytest.mark.parametrize("name", ["pwrup_reglist", "preempt_record ring0", "preempt_smmu_info ring0"])
def test_igt_msm_mapping_skips_what_an_a630_does_not_have(client: Any, name: str) -> None: assert address_of(name) == 0

def test_igt_msm_mapping_memptrs_is_open_without_hw_apriv(client: Any) -> None:
  """The test's own comment, and sdm845's list of expected failures: a GPU without HW APRIV cannot pass msm_mapping@memptrs."""
  run(client, Stream().mem_write(address_of("memptrs"), 0x123))
  assert take_dump() is None

def test_one_dump_is_kept_and_the_first_fault_makes_it(client: Any) -> None:
  for base in (0x7_0000_0000, 0x7_1000_0000): run(client, Stream().mem_write(base, 1).mem_write(base + 4096, 1))
  dump = take_dump()
  assert dump is not None and "iova=0000000700000000" in dump and "type=TRANSLATION" in dump and take_dump() is None

def test_a_hang_dump_holds_the_ring_and_the_contents_that_were_asked_for(client: Any) -> None:
  client.info(client.cmds, 2, client.buffer(b"cmdstream"), len=9)
  run(client, Stream().wait_mem(client.iova(client.target), 1), READ | 4)
  dump = take_dump()
  assert dump is not None and "fault-info" not in dump
  for line in ("---", "kernel: 6.12", "module: msm", "revision: 630 (6.3.0.2)", "ringbuffer:", "  - id: 0", "    last-fence: 1",
               "    retired-fence: 0", "bos:", "    name: cmdstream", f"  - iova: 0x{client.iova(client.cmds):016x}",
               f"  - iova: 0x{client.iova(client.target):016x}"):
    assert line in dump.splitlines(), f"{line!r} is not in\n{dump}"
  (data,) = re.findall(r"data: !!ascii85 \|\n     (\S+)", dump)
  assert decoded(data) == ctypes.string_at(client.cs, 4096)

def decoded(text: str) -> bytes:
  out, i = b"", 0
  while i < len(text):
    digits, i = ("!!!!!", i + 1) if text[i] == "z" else (text[i:i + 5], i + 5)
    v = 0
    for d in digits: v = v * 85 + ord(d) - 33
    out += struct.pack("<I", v)
  return out

def test_ascii85_of_the_kernel() -> None:
  raw = np.random.default_rng(1).integers(0, 256, 400, np.uint8).tobytes() + bytes(8) + b"\xff" * 4
  assert decoded(ascii85(raw)) == raw and ascii85(bytes(4)) == "z"

def test_an_unplugged_device_answers_enodev() -> None:
  machine, _ = boot()
  c = Msm()
  machine.msm.unplugged = True
  with pytest.raises(OSError, match="No such device"): c.param(3)
  with pytest.raises(OSError, match="No such device"): c.file.ioctl(0xc01864f0, bytearray(24))
  machine.msm.unplugged = False
  c.close()
