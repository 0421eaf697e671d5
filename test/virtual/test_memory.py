"""GPU address space and UCHE model: translation, residency, visibility between CPU, CP and shader core."""
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from test.mockgpu.qcom.memory import DIRTY, LINE, READ, RESIDENT, STALE, UNSETTLED, VALID, WRITE, BoInfo, MemoryFault, Space

def mapped(space: Space, iova: int, size: int, name: str = "", **kw) -> tuple[np.ndarray, BoInfo]:
  ram, bo = np.zeros(size, np.uint8), BoInfo(name=name, size=size)
  space.map(iova, size, ram.ctypes.data, bo=bo, **kw)
  bo.backing = ram  # type: ignore[attr-defined]
  return ram, bo

def fetch(space: Space, addr: int, size: int) -> bytes: return space.read_uche(addr, size)[0]

def shader_store(space: Space, addr: int, data: bytes) -> None:
  """What the shader core does on a store, in Python: fill the lines, write the shadow, mark them."""
  for s, off, n in space._pieces(addr, len(data), True, "UCHE"):
    with space.running():
      for i in range(off // LINE, -(-(off + n) // LINE)):
        if not s.line[i] & VALID: s.cache[i * LINE:(i + 1) * LINE] = s.mem[i * LINE:(i + 1) * LINE]
        s.line[i] |= VALID | DIRTY
      s.cache[off:off + n] = np.frombuffer(data[:n], np.uint8)
      data = data[n:]

def test_table_is_sorted_and_flags_follow_residency():
  sp = Space()
  _, a = mapped(sp, 0x30000, 0x1000)
  _, b = mapped(sp, 0x10000, 0x2000, readonly=True)
  assert sp.table()["iova"].tolist() == [0x10000, 0x30000]
  assert sp.table()["flags"].tolist() == [READ | RESIDENT, READ | WRITE | RESIDENT]
  before = sp.table()
  sp.set_resident({a})
  assert sp.table()["flags"].tolist() == [READ, READ | WRITE | RESIDENT]
  assert before["flags"][0] == READ | RESIDENT, "a running dispatch keeps the table it started with"
  assert sp.table()["bo"].tolist() == [b.id, a.id]

@pytest.mark.parametrize("iova,size", [(0x10001, 0x1000), (0x10000, 0), (0x11000, 0x1000), (0xf000, 0x2000), (0x10000, 0x10)])
def test_map_refuses_what_a_pagetable_cannot_hold(iova, size):
  sp = Space()
  mapped(sp, 0x10000, 0x2000)
  ram = np.zeros(0x4000, np.uint8)
  with pytest.raises(ValueError): sp.map(iova, size, ram.ctypes.data, bo=BoInfo())
  assert len(sp.table()) == 1

def test_faults_name_kind_and_address():
  sp = Space()
  mapped(sp, 0x10000, 0x1000)
  _, ro = mapped(sp, 0x20000, 0x1000, "weights", readonly=True)
  for addr, write, kind in [(0x9000, False, "unmapped"), (0x10ffc, True, "unmapped"), (0x20000, True, "readonly")]:
    with pytest.raises(MemoryFault) as e: sp.write(addr, bytes(8)) if write else sp.read(addr, 8)
    assert e.value.kind == kind and e.value.write == write
  sp.set_resident(set())
  with pytest.raises(MemoryFault) as e: sp.read(0x20000, 4)
  assert e.value.kind == "not_resident"
  assert "NOT in this submit's buffer list" in sp.explain(0x20010) and "'weights'" in sp.explain(0x20010)

def test_a_failed_write_changes_nothing():
  sp = Space()
  ram, _ = mapped(sp, 0x10000, 0x1000)
  with pytest.raises(MemoryFault): sp.write(0x10ffc, b"\xff" * 8)
  assert not ram.any()

def test_access_may_cross_adjacent_mappings():
  sp = Space()
  a, _ = mapped(sp, 0x10000, 0x1000)
  b, _ = mapped(sp, 0x11000, 0x1000)
  sp.write(0x10ffc, bytes(range(8)))
  assert a[-4:].tolist() == [0, 1, 2, 3] and b[:4].tolist() == [4, 5, 6, 7]
  assert sp.read(0x10ffc, 8) == bytes(range(8)) == fetch(sp, 0x10ffc, 8)

def test_explain_knows_freed_and_neighbouring_buffers():
  sp = Space()
  assert "nothing is mapped" in sp.explain(0x1234)
  _, bo = mapped(sp, 0x10000, 0x1000, "out")
  bo.history.append("allocated by test")
  assert "0x10 bytes past the end of" in sp.explain(0x11010) and "0x8 bytes before the start of" in sp.explain(0xfff8)
  sp.unmap(0x10000)
  assert "'out'" in sp.explain(0x10020) and "freed" in sp.explain(0x10020) and "allocated by test" in sp.explain(0x10020)
  with pytest.raises(KeyError): sp.unmap(0x10000)

def test_cpu_write_is_seen_only_after_invalidate():
  sp = Space()
  ram, _ = mapped(sp, 0x10000, 0x1000)
  assert fetch(sp, 0x10000, 4) == bytes(4)
  ram[:4] = 7
  assert sp.read(0x10000, 4) == b"\7" * 4
  assert fetch(sp, 0x10000, 4) == bytes(4)
  assert sp.mark_stale() == 1 and sp.find(0x10000).line[0] == VALID | STALE and sp.read_uche(0x10000, 4) == (bytes(4), True)
  sp.uche_invalidate()
  assert fetch(sp, 0x10000, 4) == b"\7" * 4 and sp.mark_stale() == 0

def test_shader_write_is_seen_by_cpu_and_cp_only_after_flush():
  sp = Space()
  ram, _ = mapped(sp, 0x10000, 0x1000)
  shader_store(sp, 0x10040, b"abcd")
  assert not ram.any() and sp.read(0x10040, 4) == bytes(4) and fetch(sp, 0x10040, 4) == b"abcd"
  sp.uche_invalidate()
  assert fetch(sp, 0x10040, 4) == b"abcd", "invalidate must not lose dirty lines"
  assert sp.uche_flush() == 1 and bytes(ram[0x40:0x44]) == b"abcd" and sp.uche_flush() == 0

def test_without_cache_model_everybody_sees_memory():
  sp = Space(uche=False)
  ram, _ = mapped(sp, 0x10000, 0x1000)
  fetch(sp, 0x10000, 4)
  ram[:4] = 9
  assert fetch(sp, 0x10000, 4) == b"\x09" * 4 and sp.table()["cache"][0] == 0

OPS = st.lists(st.tuples(st.sampled_from(["cpu", "gpu", "flush", "inv"]), st.integers(0, 699), st.integers(1, 90)), max_size=30)

@given(size=st.integers(1, 700), ops=OPS)
@settings(max_examples=150, deadline=None)
def test_uche_matches_a_byte_model(size, ops):
  """Against a dictionary per line: memory bytes, cached bytes, dirty flag."""
  sp = Space()
  ram, _ = mapped(sp, 0x10000, size)
  mem, cached, dirty = bytearray(size), {}, set()
  for k, (op, off, n) in enumerate(ops):
    if op in ("cpu", "gpu"):
      off, n = off % size, min(n, size - off % size)
      data = bytes((k * 31 + i + 1) & 0xff for i in range(n))
      if op == "cpu": ram[off:off + n], mem[off:off + n] = np.frombuffer(data, np.uint8), data
      else:
        shader_store(sp, 0x10000 + off, data)
        for i in {off // LINE} | {(off + j) // LINE for j in range(n)}:
          cached.setdefault(i, bytearray(mem[i * LINE:(i + 1) * LINE]))
          dirty.add(i)
        for j in range(n): cached[(off + j) // LINE][(off + j) % LINE] = data[j]
    elif op == "flush":
      assert sp.uche_flush() == len(dirty)
      for i in dirty: mem[i * LINE:(i + 1) * LINE] = cached[i]
      dirty.clear()
    else:
      sp.uche_invalidate()
      cached = {i: c for i, c in cached.items() if i in dirty}
    assert bytes(ram) == bytes(mem)
    line = sp.find(0x10000).line
    assert {i for i in range(-(-size // LINE)) if line[i] & DIRTY} == dirty
    assert {i for i in range(-(-size // LINE)) if line[i] & VALID} == set(cached)

def test_lines_of_dispatches_without_a_wait_are_told_apart():
  sp = Space()
  mapped(sp, 0x10000, 0x1000)
  state = lambda n: int(sp.find(0x10000).line[n])
  shader_store(sp, 0x10000, b"older")
  sp.uche_unsettle(first=True)                            # before the first dispatch: what was dirty is not its doing
  shader_store(sp, 0x10040, b"first")
  sp.uche_unsettle(first=False)
  assert state(0) & UNSETTLED == 0 and state(1) & UNSETTLED
  shader_store(sp, 0x10080, b"second")
  sp.uche_settle()
  assert [state(n) for n in range(3)] == [VALID | DIRTY] * 3 and sp.uche_flush() == 3

def test_a_gpu_reset_loses_the_cache():
  sp = Space()
  ram, _ = mapped(sp, 0x10000, 0x1000)
  shader_store(sp, 0x10000, b"lost")
  sp.uche_reset()
  assert sp.uche_flush() == 0 and not ram.any() and fetch(sp, 0x10000, 4) == bytes(4)
