"""The virtual GPU end to end: compiled kernels through the command processor, compared with numpy; what a wrong driver gets told."""
import dataclasses, threading, time
import numpy as np, pytest
pytest.importorskip("tinygrad.runtime.autogen.mesa")
from test.mockgpu.qcom.gpu import JobResult, Strict
from test.mockgpu.qcom.ir3.isa import LEFT_OUT
from test.virtual.ir3_asm import assemble, word_of
from test.virtual.rig import FIXED, Rig, Stream, tinygrad_on

@pytest.fixture
def rig():
  r = Rig(hang_polls=300, budget=1 << 22)
  yield r
  r.close()

def test_elementwise_reduce_and_matmul_match_numpy(rig):
  from tinygrad import Tensor
  rng = np.random.default_rng(0)
  a, b = rng.standard_normal((64, 48), np.float32), rng.standard_normal((48, 32), np.float32)
  with tinygrad_on(rig) as calls:
    ta, tb = Tensor(a, device="NULL").contiguous().realize(), Tensor(b, device="NULL").contiguous().realize()
    np.testing.assert_allclose((ta * 2 + 1).numpy(), a * 2 + 1, rtol=1e-6)
    np.testing.assert_allclose((ta @ tb).numpy(), a @ b, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ta.sum(axis=0).numpy(), a.sum(axis=0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(tb.softmax().numpy(), np.exp(b) / np.exp(b).sum(-1, keepdims=True), rtol=1e-5)
  assert len(calls) >= 4 and rig.gpu.counters["dispatches"] == len(calls) and not rig.gpu.reports

# *** a hand-made dispatch, then the same with one thing wrong

@pytest.fixture(scope="module")
def double():
  """out[i] = in[i] * 2 + 1 over 256 floats: (kernel, groups, local)."""
  from tinygrad import Tensor
  r = Rig()
  with tinygrad_on(r) as calls: (Tensor(np.arange(256, dtype=np.float32), device="NULL").contiguous().realize() * 2 + 1).realize()
  r.close()
  c = calls[-1]
  assert c.groups[0] * c.local[0] >= 64
  return c.kernel, c.groups, c.local

class Job:
  """The `double` kernel on fresh buffers, ready to be submitted with changes."""
  def __init__(self, rig, double):
    self.rig, (k, self.groups, self.local) = rig, double
    self.k = rig.load(dataclasses.replace(k, iova=0))
    self.x = rig.alloc(1024, "x").put(np.arange(256, dtype=np.float32))
    self.out = rig.alloc(1024, "out")
    self.args = rig.args(self.k, self.out.iova, self.x.iova)

  def stream(self, s=None, **over): return self.rig.dispatch(Stream() if s is None else s, self.k, self.args, self.groups, self.local, **over)
  def run(self, without=(), **over): return self.rig.run(self.stream(**over), without=without, name="python")
  def good(self): return np.array_equal(self.out.view(np.float32, 256), np.arange(256, dtype=np.float32) * 2 + 1)

@pytest.fixture
def job(rig, double): return Job(rig, double)

def kinds(j): return [v.kind for v in j.result.reports]

def test_a_complete_dispatch_is_accepted_without_a_word(job):
  j = job.run()
  assert j.result.status == "ok" and not j.result.reports, "\n".join(map(str, j.result.reports))
  assert job.good() and job.rig.gpu.counters["dispatches"] == 1

@pytest.mark.parametrize("which", ["x", "out", "args", "code", "ib", "dummy"])
def test_every_kind_of_buffer_is_missed_by_name(job, which):
  s = job.stream()
  if which == "ib":
    j = job.rig.job(s)
    victim = job.rig.bufs[-1]
    j.resident.discard(victim.info)
    job.rig.gpu.submit(j)
    assert j.wait(10)
  else:
    victim = next(b for b in job.rig.bufs if b.info.name.split()[0] == which)
    j = job.rig.run(s, without=[victim])
  report = str(next(v for v in j.result.reports if v.kind == "not_resident"))
  assert j.result.status in ("fault", "hang") and "NOT in this submit's buffer list" in report and f"'{victim.info.name}'" in report, report
  if which in ("x", "out"): assert "instruction" in report and "lane" in report and ("ldg" if which == "x" else "stg") in report, report
  assert all(f.dmesg.startswith("*** gpu fault: ttbr0=") for f in j.result.faults) and j.result.faults

def test_without_residency_checks_an_unlisted_buffer_works(double):
  r = Rig(strict=Strict(residency=False))
  job = Job(r, double)
  assert job.run(without=[job.x, job.out]).result.status == "ok" and job.good()
  r.close()

def test_a_closed_buffer_is_named_with_its_history(job):
  job.x.info.history.append("closed by the test")
  job.rig.space.unmap(job.x.iova)
  report = str(job.run().result.reports[0])
  assert "'x'" in report and "freed" in report and "closed by the test" in report

def test_out_of_bounds_is_told_apart_from_the_neighbour(rig, double):
  job = Job(rig, double)
  job.args = rig.args(job.k, job.out.iova + 4096 - 512, job.x.iova)
  j = job.run()
  report = str(j.result.reports[0])
  assert j.result.reports[0].kind == "unmapped" and "past the end of" in report and "'out'" in report and j.result.faults[0].write

@pytest.mark.parametrize("name", ["sp_mode_cntl", "sp_float_cntl", "cntl_0", "cntl_1", "base", "instr_size", "config", "const_config",
                                  "shared_consts"])
def test_a_register_left_to_the_previous_client_is_reported(job, name):
  j = job.run(**{name: -1})
  report = next(v for v in j.result.reports if v.kind == "stale_register")
  assert name.upper().removeprefix("SP_").replace("SHARED_CONSTS", "HLSQ_SHARED_CONSTS").replace("FLOAT_CNTL", "SP_FLOAT_CNTL") in report.summary

def test_registers_of_an_earlier_submit_do_not_count(job):
  assert not job.run().result.reports
  assert "stale_register" in kinds(job.run(sp_float_cntl=-1))

def test_a_chip_value_that_differs_is_reported(job):
  (v,) = job.run(fixed_b600=0).result.reports
  assert v.kind == "fixed_register" and "TPL1_DBG_ECO_CNTL = 0x0 (wants 0x108000)" in v.summary

@pytest.mark.parametrize("over,kind,status,text", [
  ({"const_config": 0x100}, "constlen", "ok", "CONSTLEN 0"),
  ({"config": 0}, "bad_state", "hang", "ENABLED = 0"),
  ({"instr_size": 0}, "fetch_bounds", "hang", "SP_CS_INSTR_SIZE is 0"),
  ({"instr_size": 4096}, "fetch_bounds", "hang", "not all mapped"),
  ({"cntl_0": 1 << 20 | 1 << 7}, "unsupported", "hang", "128 fibers"),
  *(({"config": 0x100 | 1 << bit}, "unsupported", "hang", "bindless descriptors") for bit in range(4)),
  ({"cntl_0": 0}, "limit", "hang", "footprint is 0 vec4"),
  ({"preload": -1}, "stale_state", "ok", "no LOAD_STATE6 of the shader"),
  ({"consts": 1}, "undefined_const", "ok", "read before it was written"),
  ({"sp_mode_cntl": 0xf}, "unsupported", "hang", "shared constants"),
])
def test_wrong_state_is_reported(job, over, kind, status, text):
  j = job.run(**over)
  assert kind in kinds(j) and j.result.status == status, [str(v) for v in j.result.reports]
  assert any(text in str(v) for v in j.result.reports), [str(v) for v in j.result.reports]

def test_a_workgroup_that_does_not_fit_is_refused(job):
  full = 48
  s = job.rig.setup(Stream(), job.k, job.args, (1, 1, 1), (1024, 1, 1), cntl_0=full << 7 | 1 << 1).pkt7(0x33, 0, 1, 1, 1).wfi()
  report = job.rig.run(s).result.reports[-1]
  assert report.kind == "limit" and "1024 threads" in report.summary and "128 threads fit" in report.summary

def test_group_counts_must_match_the_ndrange(job):
  s = job.rig.setup(Stream(), job.k, job.args, job.groups, job.local).pkt7(0x33, 0, job.groups[0] - 1, 1, 1).wfi()
  assert [v.subject for v in job.rig.run(s).result.reports] == ["ndrange"]

def test_indirect_and_opencl_dispatch_take_their_counts_from_memory_and_registers(job):
  counts = job.rig.alloc(4096, "counts").put(np.array(job.groups, np.uint32))
  x, y, z = (n - 1 for n in job.local)
  s = job.rig.setup(Stream(), job.k, job.args, job.groups, job.local).pkt7(0x41, 0, counts.iova, counts.iova >> 32, x << 2 | y << 12 | z << 22)
  assert not job.rig.run(s.wfi()).result.reports and job.good()
  job.out.ram[:] = 0
  s = job.rig.setup(Stream(), job.k, job.args, job.groups, job.local).pkt4(0xb999, *job.groups).pkt7(0x31, 0)
  assert not job.rig.run(s.wfi()).result.reports and job.good()

def test_no_groups_means_no_work(job):
  s = job.rig.setup(Stream(), job.k, job.args, (0, 1, 1), job.local).pkt7(0x33, 0, 0, 1, 1).wfi()
  assert not job.rig.run(s).result.reports and not job.out.ram.any()

def test_update_cntl_drops_queued_loads(job):
  s = job.rig.setup(Stream(), job.k, job.args, job.groups, job.local).pkt4(0xbb08, 0x20).pkt4(0xbb08, 0).pkt7(0x33, 0, *job.groups).wfi()
  got = kinds(job.rig.run(s))
  assert "stale_state" in got and "undefined_const" in got

# *** order and caches

def test_cpu_writes_between_submits_need_an_invalidate(job):
  assert not job.run().result.reports
  job.x.put(np.full(256, 3, np.float32))
  s = job.stream()
  at = next(i for i, w in enumerate(s.words) if w & 0xff7f0000 == 0x70460000 and s.words[i + 1] == 49)
  s.words[at:at + 2] = Stream().nop(0).words
  j = job.rig.run(s)
  assert "stale_line" in kinds(j) and job.good(), "the shader saw what UCHE still held"
  report = str(next(v for v in j.result.reports if "shader" in v.summary))
  assert "CACHE_INVALIDATE" in report and "'x'" in report
  assert not job.run().result.reports and (job.out.view(np.float32, 256) == 7).all()

def test_a_signal_without_wait_for_idle_comes_before_the_result(job):
  """The value is written while the dispatch may still run, and its data is not flushed."""
  sig, seen = job.rig.alloc(4096, "signal"), job.rig.alloc(4096, "seen")
  s = job.rig.setup(Stream(), job.k, job.args, job.groups, job.local).pkt7(0x33, 0, *job.groups).flush(sig.iova, 1)
  s.pkt7(0x75, 4, job.out.iova, job.out.iova >> 32, seen.iova, seen.iova >> 32)
  assert not job.rig.run(s).result.reports and sig.u32() == 1 and not seen.ram.any() and job.good()

def test_cp_reads_of_unflushed_results_are_reported(job):
  s = job.rig.setup(Stream(), job.k, job.args, job.groups, job.local).pkt7(0x33, 0, *job.groups).wfi()
  s.pkt7(0x75, 4, job.out.iova, job.out.iova >> 32, job.rig.dummy.iova, job.rig.dummy.iova >> 32)
  assert kinds(job.rig.run(s)) == ["unflushed_read"]

def dependent(job, wait):
  """Two dispatches, the second reads what the first wrote."""
  second = job.rig.alloc(1024, "second")
  args = job.rig.args(job.k, second.iova, job.out.iova)
  s = job.rig.setup(Stream(), job.k, job.args, job.groups, job.local).pkt7(0x33, 0, *job.groups)
  if wait: s.wfi()
  job.rig.setup(s, job.k, args, job.groups, job.local)
  return second, job.rig.run(s.pkt7(0x33, 0, *job.groups).wfi())

def test_dependent_dispatches_need_a_wait(job):
  second, j = dependent(job, wait=True)
  assert not j.result.reports and np.array_equal(second.view(np.float32, 256), np.arange(256) * 4 + 3)
  _, j = dependent(job, wait=False)
  report = str(next(v for v in j.result.reports if v.kind == "missing_wait"))
  assert "WAIT_FOR_IDLE" in report and "'out'" in report and "ldg" in report

def test_seeded_schedules_reorder_what_nobody_waited_for(double):
  wrong = 0
  for seed in range(8):
    r = Rig(schedule=seed, grace_s=0.0)
    second, _ = dependent(Job(r, double), wait=False)
    wrong += not np.array_equal(second.view(np.float32, 256), np.arange(256) * 4 + 3)
    r.close()
  assert 0 < wrong < 8

def test_independent_dispatches_need_no_wait(job):
  other = job.rig.alloc(1024, "other")
  args = job.rig.args(job.k, other.iova, job.x.iova)
  s = job.rig.setup(Stream(), job.k, job.args, job.groups, job.local).pkt7(0x33, 0, *job.groups)
  job.rig.setup(s, job.k, args, job.groups, job.local).pkt7(0x33, 0, *job.groups).wfi()
  assert not job.rig.run(s).result.reports and job.good() and np.array_equal(other.ram[:1024], job.out.ram[:1024])

@pytest.mark.parametrize("order", ["forward", "reversed", 1, 2])
def test_workgroup_order_does_not_change_the_result(double, order):
  r = Rig(order=order)
  job = Job(r, double)
  assert not job.run().result.reports and job.good()
  r.close()

def test_state_memory_must_not_change_before_the_dispatch(job):
  s = job.rig.setup(Stream(), job.k, job.args, job.groups, job.local)
  base = job.k.const_state.ubo_state.range[0].offset
  s.mem_write(job.args.iova + base, job.out.iova + 64).invalidate().pkt7(0x33, 0, *job.groups).wfi()
  got = kinds(job.rig.run(s))
  assert got == ["load_state_changed"] and job.good(), "the model uses what the packet loaded"

# *** hangs and the scheduler

END, SPIN = 6 << 55, 2 << 55 | 0                          # cat0 words: end, jump to itself

def program(job, *words):
  job.k = job.rig.load(dataclasses.replace(job.k, code=np.array(words, "<u8").tobytes() + bytes(-len(words) * 8 % 128), iova=0, name="hand made"))
  return job.k.iova

def test_an_endless_shader_is_a_hang_with_its_instruction_and_later_jobs_run(rig, double):
  job = Job(rig, double)
  good = job.k
  program(job, 0, SPIN, END)
  j = job.run()
  report = str(j.result.reports[-1])
  assert j.result.status == "hang" and "instruction 1" in report and "jump" in report and "'code hand made'" in report, report
  job.k = good
  assert job.run().result.status == "ok" and job.good()
  assert rig.gpu.counters["hangs"] == 1

def test_a_running_shader_can_be_killed(double):
  r = Rig(budget=1 << 40)
  job = Job(r, double)
  program(job, 0, SPIN, END)
  j = r.job(job.stream())
  r.gpu.submit(j)
  assert not j.wait(0.1)
  r.gpu.kill(j, "hangcheck")
  assert j.wait(5) and j.result.status == "hang" and j.result.reason == "hangcheck"
  r.close()

def test_unmapping_waits_for_a_running_shader(double):
  """Whoever unmaps frees the memory next."""
  r = Rig(budget=1 << 40)
  job = Job(r, double)
  program(job, SPIN)
  j = r.job(job.stream())
  r.gpu.submit(j)
  while r.gpu.cp._abort is None: time.sleep(0.01)
  time.sleep(0.05)
  unmapping = threading.Thread(target=r.space.unmap, args=(job.x.iova,))
  unmapping.start()
  unmapping.join(0.3)
  waits = unmapping.is_alive()
  r.gpu.kill(j)
  unmapping.join(60)
  assert waits and not unmapping.is_alive()
  r.close()

def test_close_ends_a_running_shader_and_refuses_more(double):
  r = Rig(budget=1 << 40)
  job = Job(r, double)
  program(job, SPIN)
  a, b = r.job(job.stream()), r.job(job.stream())
  r.gpu.submit(a)
  r.gpu.submit(b)
  assert not a.wait(0.05)
  r.close()
  assert a.finished.is_set() and b.finished.is_set() and b.result.status == "hang"
  with pytest.raises(RuntimeError, match="closed"): r.gpu.submit(b)

def test_data_instead_of_code_stops_with_the_encoding(job):
  program(job, 0xffffffffffffffff, END)
  j = job.run()
  assert j.result.status == "hang" and j.result.reports[-1].kind == "unknown_instruction" and "0xffffffffffffffff" in str(j.result.reports[-1])

def test_a_program_without_end_runs_out_of_its_declared_size(job):
  program(job, *[0] * 16)
  assert "fetch_past_end" in kinds(job.run())

def test_programs_beyond_the_instruction_cache_need_the_workaround(job):
  program(job, *[0] * 1040, END)
  assert kinds(job.run(icache=-1)) == ["icache_bound"] and not job.run().result.reports

def test_priorities_order_what_is_queued_and_nothing_preempts(rig):
  order, gate = [], rig.alloc(4096, "gate")
  first = rig.job(Stream().wait_mem(gate.iova, 1), priority=2)
  jobs = [rig.job(Stream().nop(), priority=p, on_retire=lambda j, r: order.append((j.priority, j.number))) for p in (2, 1, 0, 1, 0)]
  rig.gpu.submit(first)
  while not rig.gpu._current: time.sleep(0.001)
  for j in jobs: rig.gpu.submit(j)
  gate.put(b"\1")
  assert rig.gpu.idle(5) and order == [(0, 4), (0, 6), (1, 3), (1, 5), (2, 2)]

def test_late_jobs_start_when_somebody_asks(double):
  r = Rig(schedule="late", grace_s=30.0)
  a, b = r.job(Stream().mem_write(r.dummy.iova, 1)), r.job(Stream().mem_write(r.dummy.iova, 2))
  r.gpu.submit(a)
  r.gpu.submit(b)
  assert not a.wait(0.05)
  r.gpu.poke(a)
  assert a.wait(5) and not b.wait(0.05) and r.dummy.u32() == 1
  r.gpu.poke()
  assert b.wait(5) and r.dummy.u32() == 2
  r.close()

def test_late_jobs_start_after_the_grace_for_clients_that_poll_memory():
  r = Rig(schedule="late", grace_s=0.05)
  j = r.job(Stream().mem_write(r.dummy.iova, 1))
  t = time.monotonic()
  r.gpu.submit(j)
  assert j.wait(5) and time.monotonic() - t >= 0.045
  r.close()

def test_without_execution_the_cp_still_signals(double):
  r = Rig(execute=False)
  job = Job(r, double)
  sig = r.alloc(4096, "signal")
  j = r.run(job.stream().mem_write(sig.iova, 5).timestamp(sig.iova + 8))
  assert j.result.status == "ok" and sig.u32() == 5 and sig.view(np.uint64, 1, 8)[0] >= 1 << 32 and not job.out.ram.any()
  assert r.gpu.counters["dispatches"] == 1 and "lane_instructions" not in r.gpu.counters
  r.close()

def test_without_execution_a_repeated_stream_signals_its_new_values_and_still_fails_when_it_breaks(double):
  r = Rig(execute=False)
  job, sig = Job(r, double), r.alloc(4096, "signal")
  s = job.stream().mem_write(sig.iova, 1).wait_mem(sig.iova, 1)
  j = r.job(s)
  ib = r.bufs[-1].view(np.uint32)
  for n in range(1, 5):
    ib[len(s.words) - 8] = ib[len(s.words) - 3] = n      # patched in place, as a replayed graph is
    j = r.gpu.submit(k := dataclasses.replace(j, result=JobResult(), finished=threading.Event())) or k
    assert k.wait(5) and k.result.status == "ok" and sig.u32() == n and r.gpu.counters["dispatches"] == n
  ib[0] ^= 1 << 23
  r.gpu.submit(k := dataclasses.replace(j, result=JobResult(), finished=threading.Event()))
  assert k.wait(5) and k.result.status == "hang" and k.result.reports[0].kind == "cp_error"
  r.close()

def test_results_are_in_memory_when_the_job_retires(job):
  """The kernel's end-of-submit flush: no wait and no flush by the client."""
  s = job.rig.setup(Stream(), job.k, job.args, job.groups, job.local).pkt7(0x33, 0, *job.groups)
  assert not job.rig.run(s).result.reports and job.good()

def test_counters_count_lanes_and_bytes(job):
  job.run()
  c, per = job.rig.gpu.counters, job.rig.gpu.instructions()
  assert c["submits"] == 1 and c["submit_bos"] == len(job.rig.bufs) and c["bytes_written"] == 1024 and c["bytes_read"] == 1024
  assert sum(lanes for _, lanes in per.values()) == c["lane_instructions"] > 0 and per["end"][1] == job.groups[0] * job.local[0]

def test_a_bug_of_the_model_ends_the_job_and_says_so(job):
  class Broken:
    waves = lanes = np.zeros(1)
    bytes_read = bytes_written = 0
    def program(self, code, **kw): raise ZeroDivisionError("boom")
  job.rig.gpu._engine = Broken()
  j = job.run()
  assert j.result.status == "hang" and "ZeroDivisionError: boom" in j.result.reason and j.result.reports[0].kind == "internal"
  job.rig.gpu._engine = None
  assert job.run().result.status == "ok"

@pytest.mark.parametrize("setting", ["nearly", {"caches": True}, 5])
def test_unknown_strictness_is_refused(setting):
  with pytest.raises(ValueError, match="strict"): Strict.of(setting)

# *** descriptors, private memory, known slips

def texture(base, width=8, height=4, fmt=130):
  swizzle = 1 << 7 | 2 << 10 | 3 << 13
  return np.array([fmt << 22 | swizzle, width | height << 15, width * 16 << 7 | 1 << 29, 0, base & 0xffffffff, base >> 32] + [0] * 10, np.uint32)

def with_descriptors(job, loaded, base, without=()):
  """The `double` dispatch with one texture in its state: the descriptor loaded from `loaded`, the base register at `base`."""
  s = job.rig.setup(Stream(), job.k, job.args, job.groups, job.local, config=1 << 8 | 1 << 9)
  s.pkt4(0xa9ba, 1).load_state(1, 5, 1, loaded.iova).pkt4(0xa9e6, base, base >> 32)
  return job.rig.run(s.pkt7(0x33, 0, *job.groups).wfi(), without=without)

def test_texture_state_is_complete_only_with_its_base(job):
  desc = job.rig.alloc(4096, "descriptors").put(texture(job.x.iova))
  assert not with_descriptors(job, desc, desc.iova).result.reports and job.good()
  (v,) = job.run(config=1 << 8 | 1 << 9).result.reports[:1]
  assert v.kind == "stale_register" and "SP_CS_TSIZE" in v.summary and "SP_CS_TEXMEMOBJ_BASE" in v.summary

def test_loaded_descriptors_and_their_base_must_agree(job):
  a, b = (job.rig.alloc(4096, n).put(texture(t.iova)) for n, t in (("a", job.x), ("b", job.out)))
  (v,) = with_descriptors(job, a, b.iova).result.reports
  assert (v.kind, v.subject) == ("bad_state", "descriptor") and any("loaded" in d for d in v.details)

def test_a_descriptor_array_that_is_not_listed_faults(job):
  desc = job.rig.alloc(4096, "descriptors").put(texture(job.x.iova))
  j = with_descriptors(job, desc, desc.iova, without=[desc])
  assert "not_resident" in kinds(j) and "'descriptors'" in str(j.result.reports[0]) and j.result.faults[0].source == "UCHE"

def test_samplers_need_their_border_colours(job):
  samp, border = job.rig.alloc(4096, "samplers"), job.rig.alloc(4096, "border")
  def run(**kw):
    s = job.rig.setup(Stream(), job.k, job.args, job.groups, job.local, config=1 << 8 | 1 << 17).load_state(0, 5, 1, samp.iova)
    s.pkt4(0xa9e2, samp.iova, samp.iova >> 32).pkt4(0xb180, border.iova, border.iova >> 32)
    return job.rig.run(s.pkt7(0x33, 0, *job.groups).wfi(), **kw)
  assert not run().result.reports
  (v,) = run(without=[border]).result.reports
  assert v.kind == "not_resident" and "border colours" in v.summary and "'border'" in str(v)

def with_private_memory(job, per_item, size_4k, buf_bytes, stack=None):
  buf = job.rig.alloc(buf_bytes, "pvt")
  s = job.rig.setup(Stream(), job.k, job.args, job.groups, job.local).pkt4(0xa9b6, per_item, buf.iova, buf.iova >> 32, size_4k)
  s.pkt4(0xa9bd, per_item * 512 if stack is None else stack)
  return job.rig.run(s.pkt7(0x33, 0, *job.groups).wfi())

def test_private_memory_must_hold_every_fiber_of_both_sps(job):
  assert not with_private_memory(job, 1, 256, 256 * 4096 * 2).result.reports
  assert [(v.kind, v.subject) for v in with_private_memory(job, 1, 128, 256 * 4096 * 2, 256).result.reports] == [("pvt_mem", "size")]
  j = with_private_memory(job, 1, 256, 256 * 4096)
  assert kinds(j) == ["unmapped"] and "private memory" in j.result.reports[0].summary
  assert [v.subject for v in with_private_memory(job, 1, 256, 256 * 4096 * 2, 513).result.reports] == ["stack_offset"]

SLIPS = dict(const_config=0x100, sp_float_cntl=-1, shared_consts=-1, fixed_b600=0, **{f"fixed_{r:x}": -1 for r in FIXED if r != 0xb600})

def test_the_slips_of_tinygrad_0_14_are_named_and_can_be_tolerated(double):
  for strict, want in ((None, {"constlen", "stale_register", "fixed_register", "pvt_mem", "field_overflow"}), ("tinygrad-0.14", set())):
    r = Rig(strict=strict)
    job = Job(r, double)
    s = r.setup(Stream(), job.k, job.args, job.groups, job.local, **SLIPS)
    j = r.run(s.pkt4(0xa9bd, 0x1000).pkt7(0x33, 0, *job.groups).pkt4(0xa9bd, 0x100000).wfi())
    assert set(kinds(j)) == want and j.result.status == "ok" and job.good()
    r.close()

def test_tolerating_the_known_slips_tolerates_nothing_else(double):
  r = Rig(strict="tinygrad-0.14")
  job = Job(r, double)
  assert kinds(job.run(sp_mode_cntl=-1)) == ["stale_register"] and kinds(job.run(without=[job.x]))[0] == "not_resident"
  r.close()

# *** what the shader core does not run is an error of the job, and the next job runs

def state_with(job, *, tex=None, samp=None, uav=None, **over):
  """The `double` dispatch with one descriptor of each kind that is given."""
  s = job.rig.setup(Stream(), job.k, job.args, job.groups, job.local, **over)
  for desc, load, regs in ((tex, (1, 5), (0xa9ba, 0xa9e6)), (samp, (0, 5), (None, 0xa9e2)), (uav, (3, 13), (0xaa00, 0xa9f2))):
    if desc is None: continue
    buf = job.rig.alloc(4096, "descriptors").put(desc)
    if regs[0]: s.pkt4(regs[0], 1)
    s.load_state(*load, 1, buf.iova).pkt4(regs[1], buf.iova, buf.iova >> 32)
    if samp is desc: s.pkt4(0xb180, (border := job.rig.alloc(4096, "border")).iova, border.iova >> 32)
  return job.rig.run(s.pkt7(0x33, 0, *job.groups).wfi())

NTEX, NSAMP, NUAV = 1 << 8 | 1 << 9, 1 << 8 | 1 << 17, 1 << 8 | 1 << 22

@pytest.mark.parametrize("kind,text,over", [
  ("unsupported", "texture format 140", {"config": NTEX, "tex": texture(0x10000, fmt=140)}),
  ("unsupported", "texture format 66", {"config": NUAV, "uav": texture(0x10000, fmt=66)}),
  ("unsupported", "sampler with filters 2", {"config": NSAMP, "samp": np.array([2 << 1, 0, 0, 0], np.uint32)}),
  ("unsupported", "F16_NO_INF", {"sp_float_cntl": 8}),
], ids=lambda v: v if isinstance(v, str) else "")
def test_state_the_shader_core_does_not_model_ends_the_job_with_its_name(job, kind, text, over):
  j = state_with(job, **over)
  assert j.result.status == "hang" and text in j.result.reason and [v.kind for v in j.result.reports] == [kind], j.result
  assert job.run().result.status == "ok" and job.good()

STORE = "mov.u32u32 r2.x, c0.x\nmov.u32u32 r2.y, c0.y\nmov.u32u32 r3.x, 7\nstg.u32 g[r2.x], r3.x, 1"
FORMS_LEFT_OUT = {"cov.u8f32": 0x2018400000000004, "bindless": 0xa0081100c2040009, "cat7": 0xffffffffffffffff}

@pytest.mark.parametrize("word,text", [(word_of(key), name) for key, (name, _) in LEFT_OUT.items()] + [(w, n) for n, w in FORMS_LEFT_OUT.items()],
                         ids=lambda v: v if isinstance(v, str) else "")
def test_instructions_left_out_end_the_job_with_name_and_encoding(job, word, text):
  """Nothing of such a program is executed, not even the store that comes before."""
  good, stored = job.k, np.frombuffer(assemble(STORE)[:8 * (STORE.count("\n") + 1)], np.uint64).tolist()
  out = job.out.view(np.uint32, 256)
  for words, status in (([END], "ok"), ([word, END], "hang")):
    out[:] = 0
    program(job, *stored, *words)
    j = job.run()
    assert j.result.status == status and (out[0] == 7) == (status == "ok"), j.result
  assert text in j.result.reason and f"{word:#018x}" in j.result.reason and kinds(j) == ["unknown_instruction"] and not out.any()
  job.k = good
  assert job.run().result.status == "ok" and job.good()
