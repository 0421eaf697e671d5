"""Reports: what a person needs to act on, and the kernel's log lines as dmesg shows them on a phone."""
from __future__ import annotations
import ctypes, os, re, struct
from typing import Any
import numpy as np
import pytest
from test.mockgpu import qcom
from test.mockgpu.qcom.gpu import Strict
from test.mockgpu.qcom.kernel import GpuViolation, process
from test.qcom_open import virtual
from test.virtual.kernel_client import READ, WRITE, Kgsl, Msm
from test.virtual.rig import Rig, Stream
from tinygrad import Tensor, TinyJit

NAME, DRM = "6.3.0.2", "msm_dpu ae01000.display-controller: [drm:recover_worker] *ERROR* 6.3.0.2: "

def shape(lines: Any, pattern: str) -> re.Match[str]:
  found = [m for line in lines if (m := re.fullmatch(pattern, re.sub(r"^\[ *[\d.]+\] ", "", line)))]
  assert found, f"no line like {pattern} in:\n" + "\n".join(lines)
  return found[0]

def client(kind: str, stream: Any, **settings: Any) -> tuple[Any, Any]:
  """Runs stream(address of a page) as one submit of a raw client. (machine, its job's reports)"""
  machine = qcom.configure(strict=Strict(raise_to_waiter=False), hang_polls=50, **settings)
  if kind == "MSM":
    c: Any = Msm()
    h, ib = c.new(), c.new()
    at, cpu = c.iova(h), c.mmap(ib)
    s = stream(at)
    ctypes.memmove(cpu, struct.pack(f"<{len(s.words)}I", *s.words), 4 * len(s.words))
    c.submit([(h, READ | WRITE), (ib, READ)], [(1, 1, 0, 4 * len(s.words))])
    qcom.munmap(cpu, 4096)
  else:
    c = Kgsl()
    ctx, at, ib = c.context(0x212), c.mmap(c.alloc()), c.mmap(c.alloc())
    s = stream(at)
    ctypes.memmove(ib, struct.pack(f"<{len(s.words)}I", *s.words), 4 * len(s.words))
    c.command(ctx, [(ib, 4 * len(s.words))])
  assert machine.gpu.idle(30)
  c.close()
  return machine, machine.gpu.reports

# *** the kernel's lines

def test_msm_logs_a_cp_error_and_the_recovery() -> None:
  """As of an Adreno 660 in the kernel's CI logs (drivers/gpu/drm/ci/xfails): CP interrupt, fault line, recovery, task."""
  s = Stream().nop(1)
  s.words += [0xdeaddead, 0xdeaddead]
  machine, _ = client("MSM", lambda at: s)
  assert not [line for line in machine.dmesg if re.search(r"opcode=0x[0-9a-f]*[a-f]", line)], "hex digits of these lines are capitals"
  lines = [re.sub(r"^\[ *[\d.]+\] ", "", line) for line in machine.dmesg]
  assert lines[0] == "adreno 5000000.gpu: CP | opcode error | possible opcode=0xDEADDEAD"
  m = shape(lines[1:2], r"adreno 5000000\.gpu: \[drm:a6xx_irq\] \*ERROR\* gpu fault ring 0 fence 1 status 00800005 rb ([0-9a-f]{4})/([0-9a-f]{4}) "
                        r"ib1 ([0-9A-F]{16})/([0-9a-f]{4}) ib2 0{16}/0000")
  assert int(m[2], 16) > int(m[1], 16) > 0 and int(m[4], 16) == 2 and int(m[3], 16) >= 1 << 32, "two dwords of the IB are left"
  assert lines[2:4] == [DRM + "hangcheck recover!", DRM + f"offending task: {process().comm} ({process().cmdline})"]

def test_msm_names_the_task_as_the_client_set_it() -> None:
  machine = qcom.configure(strict=Strict(raise_to_waiter=False), hang_polls=20)
  c = Msm()
  for param, text in ((12, b"camerad"), (13, b"/usr/bin/camerad --fast")): c("SET_PARAM", pipe=0x10, param=param, value=c.buffer(text), len=len(text))
  ib = c.new()
  cpu = c.mmap(ib)
  s = Stream().wait_mem(c.iova(ib) + 2048, 1)
  ctypes.memmove(cpu, struct.pack(f"<{len(s.words)}I", *s.words), 4 * len(s.words))
  c.submit([(ib, READ)], [(1, 0, 0, 4 * len(s.words))])
  assert machine.gpu.idle(30)
  shape(machine.dmesg, re.escape(DRM) + r"offending task: camerad \(/usr/bin/camerad --fast\)")
  qcom.munmap(cpu, 4096)
  c.close()

def test_a_hang_in_a_nested_buffer_shows_both_levels() -> None:
  rig = Rig(hang_polls=10)
  inner = Stream().nop().nop().wait_mem(rig.dummy.iova, 1)
  ib2 = rig.alloc(4096, "ib2").put(struct.pack(f"<{len(inner.words)}I", *inner.words))
  job = rig.run(Stream().call(ib2.iova, len(inner.words)).nop(1, 2, 3))
  m = shape(rig.gpu.dmesg, r".*ib1 ([0-9A-F]{16})/([0-9a-f]{4}) ib2 ([0-9A-F]{16})/([0-9a-f]{4})")
  assert (int(m[1], 16), int(m[2], 16), int(m[3], 16), int(m[4], 16)) == (job.ibs[0][0], 8, ib2.iova, 7)
  rig.close()

@pytest.mark.parametrize("what,line", [
  (lambda s: s.pkt4(0x0800, 1), r"CP \| protected mode error \| WRITE \| addr=0x00000800 \| status=0x00000800"),
  (lambda s: s.pkt7(0x3e, 0x0800 | 1 << 18, 0, 1), r"CP \| protected mode error \| READ \| addr=0x00000800 \| status=0x00100800"),
  (lambda s: s.pkt4(0x9999, 1), r"CP \| AHB bus error"),
  (lambda s: s.pkt7(0x7e, 1), r"CP \| opcode error \| possible opcode=0x70[0-9A-F]{6}"),
], ids=["write", "read", "bus", "opcode"])
def test_cp_interrupts(what: Any, line: str) -> None:
  machine, _ = client("MSM", lambda at: what(Stream()))
  shape(machine.dmesg, r"adreno 5000000\.gpu: " + line)

def test_msm_limits_the_rate_of_fault_lines() -> None:
  s = Stream()
  for i in range(25): s.mem_write(0x7_0000_0000 + 4096 * i, 1)
  machine, reports = client("MSM", lambda at: s)
  lines = [line for line in machine.dmesg if "gpu fault" in line]
  assert len(lines) == 10 and len(reports) == 25 and machine.gpu.counters["faults"] == 25

def test_kgsl_logs_a_page_fault_with_its_neighbours_and_stops_there() -> None:
  machine, reports = client("KGSL", lambda at: Stream().mem_write(at + 0x100000, 1).mem_write(at + 0x200000, 1))
  assert [v.kind for v in reports] == ["unmapped"], "the GPU stalls, what comes after the fault is not executed"
  lines = [re.sub(r"^\[ *[\d.]+\] ", "", line) for line in machine.dmesg]
  pid = os.getpid()
  for line, pattern in zip(lines, (
    rf"kgsl kgsl-3d0: GPU PAGE FAULT: addr = 700100000 pid= {pid} name={re.escape(process().comm)}",
    r"kgsl kgsl-3d0: context=gfx3d_user TTBR0=0x[0-9a-f]{9,} \(write translation fault\)", r"kgsl kgsl-3d0: FAULTING BLOCK: CP",
    r"kgsl kgsl-3d0: ---- nearby memory ----", rf"kgsl kgsl-3d0: \[0000000700001000 - 0000000700001FFF\] \+ \(pid = {pid}\) \(any\)",
    r"kgsl kgsl-3d0:  <- fault @ 700100000", r"kgsl kgsl-3d0: \*EMPTY\*")): assert re.fullmatch(pattern, line), (pattern, line)
  shape(lines[7:8], rf"kgsl kgsl-3d0: \|adreno\| {re.escape(process().comm)}\[{pid}\]: gpu fault ctx 1 ts 1 "
                    r"status 00800005 rb [0-9a-f]{4}/[0-9a-f]{4} ib1 0000000700001000/[0-9a-f]{4} ib2 0{16}/0000")
  assert len(lines) == 8

# *** the report itself

def test_a_use_after_free_names_instruction_lanes_buffer_and_both_calls() -> None:
  """A replay reads memory that went back to the kernel behind the runtime's back."""
  with virtual("KGSL") as (machine, dev):
    f = TinyJit(lambda x: (x * 3).realize())
    xs = [Tensor(np.full(4096, i, np.float32)).realize() for i in range(4)]
    for x in xs[:3]: f(x)
    dev.synchronize()
    with pytest.MonkeyPatch.context() as m:
      m.setattr(dev.iface.live, "remove", lambda start: None)
      dev.iface.free(xs[3].uop.buffer._buf)
    with pytest.raises((GpuViolation, RuntimeError)): f(xs[3]).numpy()
    text = "\n".join(map(str, machine.gpu.reports))
  for pattern in (r"unmapped: shader load of 16 bytes at 0x7",
                  r"in submit \d+ '.* ctx 1 ts \d+', dispatch 1, kernel E_\S+, IB1 0x7\w+ dword 0x\w+ \(CP_EXEC_CS\)",
                  r"instruction \d+ at 0x[0-9a-f]+: ldg\.u32 ", r"lane \d+ of workgroup \(\d+, \d+, \d+\)",
                  r"and \d+ more lanes, addresses 0x7\w+ to 0x7\w+", r"0x\w+ into BO \d+, which was freed [\d.]+ ms ago",
                  r"allocated, 16384 bytes, at [\d.]+ s: runtime/support/qcom_iface\.py:\d+ in \w+, called from .*test_reports\.py:\d+ in <listcomp>",
                  r"freed at [\d.]+ s: runtime/support/qcom_iface\.py:\d+ in \w+, called from .*test_reports\.py:\d+ in test_"):
    assert re.search(pattern, text), f"{pattern} is not in\n{text}"

def test_a_buffer_that_is_not_listed_says_who_listed_it_last() -> None:
  machine = qcom.configure(strict=Strict(raise_to_waiter=False))
  c = Msm()
  h, ib = c.new(), c.new()
  c.info(h, 2, c.buffer(b"weights"), len=7)
  cpu = c.mmap(ib)
  s = Stream().mem_write(c.iova(h) + 16, 1)
  ctypes.memmove(cpu, struct.pack(f"<{len(s.words)}I", *s.words), 4 * len(s.words))
  for bos in ([(ib, READ), (h, WRITE)], [(ib, READ)]): c.submit(bos, [(1, 0, 0, 4 * len(s.words))])
  assert machine.gpu.idle(30)
  text = str(machine.gpu.reports[0])
  for part in ("not_resident: CP writes 4 bytes", "submit 2 ", f"0x10 into BO {h} 'weights'", "NOT in this submit's buffer list",
               "last listed by submit of queue 0, fence 1", "GEM_NEW of 4096 bytes", "kernel_client.py", "dmesg: *** gpu fault: ttbr0="):
    assert part in text, text
  qcom.munmap(cpu, 4096)
  c.close()
