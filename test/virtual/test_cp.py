"""Command processor: packets, registers, what stops it, what it writes and when."""
import struct, time
import numpy as np, pytest
from test.mockgpu.qcom import registers as R
from test.mockgpu.qcom.cp import OPCODES, parity
from test.mockgpu.qcom.gpu import Strict
from test.virtual.rig import Rig, Stream, odd

@pytest.fixture
def rig():
  r = Rig(hang_polls=200)
  yield r
  r.close()

def ok(job):
  assert job.result.status == "ok" and not job.result.reports, "\n".join(map(str, job.result.reports)) or job.result.reason
  return job

def broken(job, kind, *texts):
  assert job.result.status == "hang", job.result
  report = str(job.result.reports[-1])
  assert job.result.reports[-1].kind == kind and all(t in report for t in texts), report
  return report

# *** headers and registers

def test_parity_is_odd_over_value_and_bit():
  for v in [0, 1, 3, 0x7f, 0x3ffff, *range(1000)]: assert (bin(v).count("1") + parity(v)) % 2 == 1

def test_register_table_agrees_with_mesa():
  mesa = pytest.importorskip("tinygrad.runtime.autogen.mesa")
  alias = {"SP_FLOAT_CNTL": "SP_NC_MODE_CNTL_2"}          # renamed between Mesa releases
  checked = 0
  for reg in R.REGISTERS.values():
    name = alias.get(reg.name, reg.name)
    if "[" in name or name.endswith("_HI"): continue
    assert getattr(mesa, f"REG_A6XX_{name}") == reg.offset, name
    for f in reg.fields:
      mask = getattr(mesa, f"A6XX_{name}_{f.name}__MASK", getattr(mesa, f"A6XX_{name}_{f.name}", None))
      if mask is not None:
        assert mask == f.mask, f"{name}.{f.name}"
        checked += 1
  assert checked > 60

def test_opcodes_agree_with_mesa():
  mesa = pytest.importorskip("tinygrad.runtime.autogen.mesa")
  for op, name in OPCODES.items(): assert getattr(mesa, name) == op, name

def test_no_known_register_is_protected_from_clients(): assert not [r.name for r in R.REGISTERS.values() if R.protected(r.offset, True)]

@pytest.mark.parametrize("word,text", [
  (0x70908000, "wrong parity"), (0x70100000, "wrong parity"), (Stream().pkt4(0xb987, 0).words[0] ^ 1 << 27, "wrong parity"),
  (Stream().pkt4(0xb987, 0).words[0] ^ 1 << 7, "wrong parity"),
  (0x40000000 | odd(0xb987) << 27 | 0xb987 << 8 | 1 << 7, "writes no register"), (0, "not a packet header"),
  (0xdeadbeef, "not a packet header"), (0x70000000 | odd(0x7f) << 23 | 0x7f << 16 | 1 << 15, "unknown opcode 0x7f"),
  (0x70000000 | odd(0x10) << 23 | 0x10 << 16 | 1 << 15 | 1 << 14, "reserved bits")])
def test_bad_headers_stop_the_cp_at_their_dword(rig, word, text):
  s = Stream().nop(1, 2)
  s.words.append(word)
  report = broken(rig.run(s.mem_write(rig.dummy.iova, 7)), "cp_error", text, "dword 0x3")
  assert rig.dummy.u32() == 0, "nothing after the bad packet runs"
  assert any("CP |" in line for line in rig.gpu.dmesg) and "hang" in report

def test_a_packet_must_end_inside_its_buffer(rig):
  s = Stream().mem_write(rig.dummy.iova, 1, 2)
  s.words.pop()
  broken(rig.run(s), "cp_error", "wants 4 dwords", "CP_MEM_WRITE")

def test_unknown_and_protected_registers_stop_the_cp(rig):
  broken(rig.run(Stream().pkt4(0xb98a, 1)), "cp_error", "register 0xb98a")
  broken(rig.run(Stream().pkt4(0xb986, 0xfc, 0x100, 0)), "cp_error", "register 0xb988", "dword 2 of 3")
  broken(rig.run(Stream().pkt4(0x0810, 1)), "cp_error", "protects")
  assert any("protected mode error" in line for line in rig.gpu.dmesg)

def test_bits_outside_a_field_are_reported_and_dropped(rig):
  job = rig.run(Stream().pkt4(0xa9bd, 0x100001).pkt7(0x3e, 0xa9bd, rig.dummy.iova, rig.dummy.iova >> 32))
  (v,) = job.result.reports
  assert v.kind == "field_overflow" and v.subject == "SP_CS_PVT_MEM_STACK_OFFSET" and "0x100000" in v.summary and job.result.status == "ok"
  assert rig.dummy.u32() == 1

def test_lenient_findings_are_tolerated():
  r = Rig(strict=Strict(lenient=frozenset({"field_overflow:SP_CS_PVT_MEM_STACK_OFFSET"})))
  ok(r.run(Stream().pkt4(0xa9bd, 0x100000)))
  assert r.run(Stream().pkt4(0xa9b1, 0x80)).result.reports[0].kind == "field_overflow"
  r.close()

# *** memory packets

def test_mem_write_event_and_nested_buffers(rig):
  out = rig.alloc(4096, "out")
  inner = Stream().mem_write(out.iova + 8, 3, 4)
  ib2 = rig.alloc(4096, "ib2").put(struct.pack(f"<{len(inner.words)}I", *inner.words))
  ok(rig.run(Stream().mem_write(out.iova, 1).call(ib2.iova, len(inner.words)).event(4, out.iova + 4, 2)))
  assert out.view(np.uint32, 4).tolist() == [1, 2, 3, 4]

def test_chained_buffer_does_not_return(rig):
  out = rig.alloc(4096, "out")
  inner = Stream().mem_write(out.iova, 5)
  ib2 = rig.alloc(4096, "ib2").put(struct.pack(f"<{len(inner.words)}I", *inner.words))
  ok(rig.run(Stream().pkt7(0x57, ib2.iova, ib2.iova >> 32, len(inner.words)).mem_write(out.iova + 4, 6)))
  assert out.view(np.uint32, 2).tolist() == [5, 0]

def test_timestamps_are_one_sample_of_the_always_on_counter():
  for start in (0, (1 << 32) - 1000, (1 << 48) - 5):
    r = Rig(counter_start=start)
    out = r.alloc(4096)
    lo = r.gpu.counter_ticks()
    ok(r.run(Stream().timestamp(out.iova).timestamp(out.iova + 8).pkt7(0x46, 4 | 1 << 30, out.iova + 16, out.iova >> 32)))
    a, b, c = map(int, out.view(np.uint64, 3))
    assert start <= lo <= a <= b <= c <= r.gpu.counter_ticks()
    r.close()

def test_the_counter_runs_at_19_2_mhz(rig):
  a, t = rig.gpu.counter_ticks(), time.perf_counter()
  time.sleep(0.05)
  b, dt = rig.gpu.counter_ticks(), time.perf_counter() - t
  assert abs((b - a) / dt / 19.2e6 - 1) < 0.02

def test_arithmetic_packets(rig):
  m = rig.alloc(4096, "m")
  m.put(struct.pack("<4I", 10, 0xffffffff, 3, 0))
  at = lambda i: (m.iova + 4 * i, m.iova >> 32)
  s = (Stream().pkt7(0x73, 1 << 1, *at(8), *at(0), *at(2))                                            # m[8] = m[0] - m[2]
       .pkt7(0x73, 1 << 29, *at(10), *at(0), *at(2))                                                  # 64-bit sum
       .pkt7(0x75, 4, *at(0), *at(12))                                                                # copy
       .pkt7(0x42, 0x883 | 1 << 19, *at(0)).pkt7(0x21, 0x883 | 4 << 24, 0xff, 0x100)                   # scratch = rotl(10, 4) & 0xff | 0x100
       .pkt7(0x3e, 0x883, *at(16)).pkt7(0x3e, 0x883 | 1 << 31, *at(0)))                                # store; accumulate onto m[0]
  ok(rig.run(s))
  v = m.view(np.uint32, 20).tolist()
  assert v[8] == 7 and v[10] | v[11] << 32 == (10 | 0xffffffff << 32) + 3 & (1 << 64) - 1 and v[12:16] == [10, 0xffffffff, 3, 0]
  assert v[16] == 0x1a0 and v[0] == 10 + 0x1a0

def test_cp_must_wait_for_its_own_writes(rig):
  m = rig.alloc(4096, "m")
  copy = (4, m.iova, m.iova >> 32, m.iova + 64, m.iova >> 32)
  (v,) = rig.run(Stream().mem_write(m.iova, 1, 2, 3, 4).pkt7(0x75, *copy)).result.reports
  assert v.kind == "cp_order" and "CP_WAIT_MEM_WRITES" in str(v)
  ok(rig.run(Stream().mem_write(m.iova, 1, 2, 3, 4).pkt7(0x12).pkt7(0x75, *copy)))
  assert m.view(np.uint32, 4, 64).tolist() == [1, 2, 3, 4]

def test_conditional_packets(rig):
  m = rig.alloc(4096, "m").put(struct.pack("<2I", 1, 5))
  at = lambda i: (m.iova + 4 * i, m.iova >> 32)
  skip = len(Stream().mem_write(m.iova, 1).words)
  s = Stream()
  for k, (first, ref) in enumerate([(0, 6), (0, 5), (3, 6)]): s.pkt7(0x44, *at(first), *at(1), ref, skip).mem_write(m.iova + 32 + 4 * k, 1)
  s.pkt7(0x45, 0x10 | 3 | 1 << 8, *at(1), 5, 0xff, *at(4), 77).pkt7(0x45, 0x10 | 3 | 1 << 8, *at(1), 6, 0xff, *at(5), 77)
  s.pkt4(0x883, 4).pkt7(0x39, 0x883 | 2 << 20).pkt7(0x47, 1 << 28, skip).mem_write(m.iova + 64, 1)
  s.pkt7(0x39, 0x883 | 1 << 20).pkt7(0x47, 1 << 28, skip).mem_write(m.iova + 68, 1)
  ok(rig.run(s))
  v = m.view(np.uint32, 18).tolist()
  assert v[8:11] == [1, 0, 0] and v[4:6] == [77, 0] and v[16:18] == [1, 0]

@pytest.mark.parametrize("func,passes", [(0, (4, 5, 6)), (1, (4,)), (2, (4, 5)), (3, (5,)), (4, (4, 6)), (5, (5, 6)), (6, (6,))])
def test_wait_reg_mem_compares(func, passes):
  r = Rig(hang_polls=10)
  for value in (4, 5, 6):
    m = r.alloc(4096).put(struct.pack("<I", value | 0xff00))
    job = r.run(Stream().pkt7(0x3c, 0x10 | func, m.iova, m.iova >> 32, 5, 0xff, 32))
    assert (job.result.status == "ok") == (value in passes), (func, value)
  r.close()

def test_signed_wait_sees_minus_one_below_zero(rig):
  m = rig.alloc(4096).put(struct.pack("<i", -1))
  ok(rig.run(Stream().pkt7(0x3c, 0x18 | 1, m.iova, m.iova >> 32, 0, 0xffffffff, 32)))
  broken(rig.run(Stream().pkt7(0x3c, 0x10 | 1, m.iova, m.iova >> 32, 0, 0xffffffff, 32)), "hang", "polled 200 times")

def test_a_wait_ends_when_the_cpu_writes(rig):
  m = rig.alloc(4096, "signal")
  job = rig.job(Stream().wait_mem(m.iova, 3).mem_write(rig.dummy.iova, 9))
  rig.gpu.submit(job)
  assert not job.wait(0.03) and rig.dummy.u32() == 0
  m.put(struct.pack("<I", 3))
  assert job.wait(5) and rig.dummy.u32() == 9
  ok(job)

def test_an_unsatisfied_wait_is_a_hang_that_names_the_buffer_and_later_jobs_run(rig):
  m = rig.alloc(4096, "signal").put(struct.pack("<I", 2))
  job = rig.run(Stream().nop().wait_mem(m.iova, 3), name="python")
  report = broken(job, "hang", "'signal'", "value 0x2", ">= 0x3", "dword 0x1 (CP_WAIT_REG_MEM)")
  assert "submit 1 'python'" in report
  ok(rig.run(Stream().mem_write(rig.dummy.iova, 1)))
  assert rig.dummy.u32() == 1 and any("gpu fault ring 0 fence 1 status" in line for line in rig.gpu.dmesg)

# *** faults of the CP itself

def test_cp_write_to_nowhere_is_a_logged_fault_and_the_job_goes_on(rig):
  job = rig.run(Stream().mem_write(0x1deaddead000, 1).mem_write(rig.dummy.iova, 2))
  assert job.result.status == "fault" and rig.dummy.u32() == 2
  (f,) = job.result.faults
  assert f.iova == 0x1deaddead000 and f.write and f.kind == "TRANSLATION"
  assert f.dmesg == f"*** gpu fault: ttbr0={rig.space.ttbr0:016x} iova=00001deaddead000 dir=WRITE type=TRANSLATION source=CP (0,0,0,0)"
  assert f.dmesg in rig.gpu.dmesg

def test_the_fault_line_shows_the_scratch_registers(rig):
  job = rig.run(Stream().pkt4(0x883 + 4, 1, 22, 333, 4444).mem_write(0x1deaddead000, 1))
  assert job.result.faults[0].dmesg.endswith("source=CP (1,22,333,4444)")

def test_an_unaligned_cp_address_loses_its_lowest_bits_and_nothing_stops(rig):
  job = rig.run(Stream().mem_write(0x1deaddead, 1).mem_write(rig.dummy.iova + 6, 7).wait_mem(rig.dummy.iova + 5, 7)
                .pkt7(0x75, 1, rig.dummy.iova + 7, rig.dummy.iova >> 32, rig.dummy.iova + 8, rig.dummy.iova >> 32))
  assert job.result.status == "fault" and [f.iova for f in job.result.faults] == [0x1deaddeac]
  assert rig.dummy.view(np.uint32, 3).tolist() == [0, 7, 7]
  assert [(v.kind, v.subject) for v in job.result.reports if v.kind == "misaligned"] == [("misaligned", "cp")] * 4

def test_a_buffer_left_out_of_the_list_is_named(rig):
  secret = rig.alloc(4096, "forgotten")
  job = rig.run(Stream().mem_write(secret.iova + 16, 1), without=[secret])
  report = str(job.result.reports[0])
  assert job.result.status == "fault" and job.result.reports[0].kind == "not_resident" and not secret.ram.any()
  assert "'forgotten'" in report and "0x10 into" in report and "NOT in this submit's buffer list" in report

def test_readonly_buffers_fault_with_permission(rig):
  ro = rig.alloc(4096, "ro", readonly=True)
  job = rig.run(Stream().mem_write(ro.iova, 1))
  assert job.result.faults[0].kind == "PERMISSION" and [v.kind for v in job.result.reports] == ["readonly"] and not ro.ram.any()

def test_an_unmapped_command_buffer_hangs(rig):
  job = rig.job(Stream().nop())
  job.ibs = [(0x1_8000_0000, 4)]
  rig.gpu.submit(job)
  assert job.wait(5) and job.result.status == "hang" and job.result.faults[0].source == "CDP Prefetch"
