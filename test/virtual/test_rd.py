""".rd captures: read back by a parser written from the format's description, and by gzip's own reader."""
import gzip, json, os, re, struct, subprocess, sys
import numpy as np, pytest
from test.mockgpu import qcom
from test.virtual.ir3_asm import disassemble
from test.virtual.rig import Rig, Stream
from tinygrad.runtime.support import qcom_rd

def sections(path):
  with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as f: raw = f.read()
  out, at = [], 0
  while at < len(raw):
    kind, size = struct.unpack_from("<II", raw, at)
    out.append((kind, raw[at + 8:at + 8 + size]))
    assert len(out[-1][1]) == size, "truncated section"
    at += 8 + size
  return out

def submits(path):
  """[(command text, {iova: (size, contents or None)}, [(iova, dwords)])] as a reader of the format collects them."""
  out, bufs, cmds, text = [], {}, [], None
  head, rest = sections(path)[:2], sections(path)[2:]
  for kind, data in rest + [(2, b"")]:
    if kind == 2:
      if text is not None: out.append((text, bufs, cmds))
      text, bufs, cmds = data.decode(), {}, []
    elif kind == 3:
      lo, size, hi = struct.unpack("<III", data)
      bufs[last := lo | hi << 32] = (size, None)
    elif kind == 12: bufs[last] = (bufs[last][0], data)
    elif kind == 6: cmds.append((lambda lo, n, hi: (lo | hi << 32, n))(*struct.unpack("<III", data)))
    else: raise AssertionError(f"section {kind}")
  return head, out

@pytest.mark.parametrize("name", ["capture.rd", "capture.rd.gz"])
def test_a_capture_holds_what_was_submitted(tmp_path, name):
  path = tmp_path / name
  r = Rig(rd=str(path), chip_id=0x06030002)
  r.dummy.put(b"before")
  big, hidden = r.alloc(2 << 20, "tensor"), r.alloc(4096, "not listed")
  first, second = Stream().mem_write(r.dummy.iova, 0x11223344), Stream().nop(7)
  r.run(first, without=[hidden])
  r.run(second, without=[hidden])
  r.close()
  head, (a, b) = submits(path)
  assert head == [(13, struct.pack("<I", 630)), (14, struct.pack("<Q", 0x06030002))]
  assert "fence=1" in a[0] and "fence=2" in b[0] and len(a[0]) % 4 == 0 or a[0].endswith("\0")
  assert a[1][r.dummy.iova][1][:6] == b"before" and b[1][r.dummy.iova][1][:4] == bytes.fromhex("44332211"), "memory as it was before each submit"
  assert a[1][big.iova] == (2 << 20, None) and hidden.iova not in a[1]
  for (_, bufs, cmds), stream in ((a, first), (b, second)):
    ((iova, dwords),) = cmds
    assert np.frombuffer(bufs[iova][1], np.uint32, dwords).tolist() == stream.words

@pytest.mark.parametrize("switch", ["QCOM_RD", "QCOM_MOCK"])
@pytest.mark.parametrize("kind", ["MSM", "KGSL"])
def test_a_script_that_just_ends_leaves_a_whole_file(tmp_path, kind, switch):
  path = tmp_path / "run.rd.gz"
  env = {**os.environ, "DEV": f"MOCK{kind}+QCOM", switch: str(path) if switch == "QCOM_RD" else json.dumps({"rd": str(path)})}
  subprocess.run([sys.executable, "-c", "from tinygrad import Tensor\nassert (Tensor([1.0, 2.0]) + 1).tolist() == [2.0, 3.0]"], env=env, check=True,
                 timeout=240)
  assert [len(cmds) for _, _, cmds in submits(path)[1]] == [1]  # gzip's reader refuses a file without its end

def test_an_unwritable_path_is_one_clear_error(tmp_path):
  with pytest.raises(OSError, match="cannot write the .rd capture"): Rig(rd=str(tmp_path / "missing" / "x.rd"))

# *** a whole run, decoded from its capture alone

class Decoded:
  """What a reader of the format makes of one submit: registers at each dispatch, loads of state, names. Memory is the capture's own."""
  def __init__(self, buffers, cmds):
    self.buffers, self.dispatches, self.names, self.regs, self.loads = buffers, [], [], {}, {}
    for iova, dwords in cmds: self.stream(self.read(iova, 4 * dwords))

  def read(self, addr, size):
    for start, (n, data) in self.buffers.items():
      if start <= addr and addr + size <= start + n:
        assert data is not None, f"the buffer at {start:#x} is declared, its contents are not there"
        return data[addr - start:addr - start + size]
    raise AssertionError(f"{addr:#x} is in no buffer of the capture")

  def stream(self, raw):
    words, i = np.frombuffer(raw, np.uint32).tolist(), 0
    while i < len(words):
      h = words[i]
      if h >> 28 == 4:
        n, reg = h & 0x7f, h >> 8 & 0x3ffff
        self.regs.update(zip(range(reg, reg + n), words[i + 1:i + 1 + n]))
      else:
        assert h >> 28 == 7, f"dword {i} = {h:#x} is no packet"
        n, op, a = h & 0x3fff, h >> 16 & 0x7f, words[i + 1:i + 1 + (h & 0x3fff)]
        if op == 0x10: self.names.append(struct.pack(f"<{n}I", *a).rstrip(b"\0").decode())
        if op == 0x34: self.loads[a[0] >> 18 & 15, a[0] >> 14 & 3] = a[1] | a[2] << 32, a[0] >> 22
        if op == 0x33: self.dispatches.append((tuple(a[1:4]), dict(self.regs), dict(self.loads)))
        if op == 0x3f: self.stream(self.read(a[0] | a[1] << 32, 4 * a[2]))
      i += 1 + n

@pytest.mark.parametrize("kind", ["MSM", "KGSL"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("switch", ["QCOM_RD", "QCOM_MOCK"])
def test_a_run_can_be_decoded_from_its_capture(tmp_path, kind, full, switch, monkeypatch):
  """Settings from the environment, as a user would give them: kernels' names, launches, machine code, constants and (if full) tensors.
  QCOM_RD is the runtime's own capture, on whatever kernel it runs; the other one is of what reached the virtual GPU."""
  from test.qcom_open import virtual
  from tinygrad import Tensor
  path = tmp_path / "run.rd.gz"
  if switch == "QCOM_MOCK": monkeypatch.setenv("QCOM_MOCK", json.dumps({"rd": str(path), "rd_full": full}))
  else:
    monkeypatch.setenv("QCOM_RD", str(path))
    monkeypatch.setenv("QCOM_RD_FULL", str(int(full)))
  x = np.arange(1 << 19, dtype=np.float32)
  with virtual(kind) as (machine, dev):
    launched = []
    machine.gpu.observer = lambda p, registers: launched.append((p.kernel, p.dispatch.groups, p.code, p.dispatch.consts.copy()))
    t = Tensor(x).realize()
    np.testing.assert_array_equal((t + 3).numpy(), x + 3)
    at = int(t.uop.buffer._buf.va_addr)
    if dev.iface.rd is not None: dev.iface.rd.close()
  monkeypatch.setenv("QCOM_MOCK", "")
  qcom.configure()                                      # closes the machine and its capture
  _, recorded = submits(path)
  decoded = [Decoded(bufs, cmds) for _, bufs, cmds in recorded if cmds]
  assert re.fullmatch(r"[^/]+/\d+: (fence|submit)=1\0*", recorded[0][0])
  got = [(d.names, dispatch) for d in decoded for dispatch in d.dispatches]
  assert [groups for _, (groups, _, _) in got] == [groups for _, groups, _, _ in launched]
  for d in decoded:
    for _, regs, loads in d.dispatches:
      name, _, code, consts = launched.pop(0)
      assert name in d.names
      image = d.read(regs[0xa9b4] | regs[0xa9b5] << 32, 128 * regs[0xa9bc])
      assert image == code and "end" in disassemble(image) and any("stg" in line for line in disassemble(image))
      addr, units = loads[13, 1]
      assert d.read(addr, 16 * units) == consts.tobytes()[:16 * units]
      size, contents = next((n, data) for start, (n, data) in d.buffers.items() if start == at)
      assert size >= x.nbytes and (contents is not None) == full
      if contents is not None: assert contents[:x.nbytes] == x.tobytes()
  assert not launched

def captured(kind, monkeypatch, launches, **env):
  """(what readers see of the runtime's capture, results) of `launches` submits."""
  from test.qcom_open import virtual
  from tinygrad import Tensor
  for k, v in env.items(): monkeypatch.setenv(k, v)
  with virtual(kind) as (_, dev):
    t = Tensor([1.0, 2.0, 3.0]).realize()
    for _ in range(launches): t = (t + 1).contiguous().realize()
    got = t.tolist()
    if dev.iface.rd is not None: dev.iface.rd.close()
  return got

@pytest.mark.parametrize("kind", ["MSM", "KGSL"])
@pytest.mark.parametrize("only,numbers", [("2", [2]), ("2-3", [2, 3]), ("3-", [3, 4, 5])])
def test_a_range_of_submits(tmp_path, kind, only, numbers, monkeypatch):
  path = tmp_path / f"{only}.rd"
  assert captured(kind, monkeypatch, 5, QCOM_RD=str(path), QCOM_RD_RANGE=only) == [6, 7, 8]
  assert [int(re.search(r"submit=(\d+)", text)[1]) for text, _, _ in submits(path)[1]] == numbers

@pytest.mark.parametrize("env,words", [
  *(({"QCOM_RD": "x.rd", "QCOM_RD_RANGE": r}, f"QCOM_RD_RANGE={r} is not a range of submits") for r in ("two", "0", "0-3", "5-4", "-3")),
  ({"QCOM_RD_RANGE": "2"}, "QCOM_RD_RANGE=2 .* QCOM_RD"), ({"QCOM_RD": "x.rd", "QCOM_RD_FULL": "yes"}, "QCOM_RD_FULL=yes: it is 0 or 1"),
  ({"QCOM_RD": "missing/x.rd"}, "QCOM_RD: cannot write the .rd capture: No such file")])
def test_wrong_settings_are_refused(tmp_path, monkeypatch, env, words):
  monkeypatch.chdir(tmp_path)
  with pytest.raises((ValueError, OSError), match=words): captured("MSM", monkeypatch, 1, **env)

def test_a_range_that_no_submit_is_in_is_told_at_exit(tmp_path):
  script = "from tinygrad import Tensor; print((Tensor([1.0]) + 1).tolist())"
  env = {**os.environ, "DEV": "MOCKMSM+QCOM:IR3", "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
  for only, told in (("1-", False), ("7-9", True)):
    done = subprocess.run([sys.executable, "-c", script], env={**env, "QCOM_RD": str(tmp_path / "x.rd"), "QCOM_RD_RANGE": only},
                          capture_output=True, text=True, timeout=240)
    assert done.stdout == "[2.0]\n" and (f"QCOM_RD_RANGE={only}: the process made 1 submits" in done.stderr) == told, done.stderr

@pytest.mark.parametrize("kind", ["MSM", "KGSL"])
def test_a_full_disk_ends_the_capture_and_not_the_run(kind, monkeypatch, capfd):
  qcom_rd.from_environment.cache_clear()                # the other kernel's test has one of that name
  assert captured(kind, monkeypatch, 3, QCOM_RD="/dev/full") == [4, 5, 6]
  assert "the .rd capture ends before submit 1: " in capfd.readouterr().err
