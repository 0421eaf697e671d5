""".rd captures: read back by a parser written from the format's description, and by gzip's own reader."""
import gzip, struct
import numpy as np, pytest
from test.virtual.rig import Rig, Stream

def sections(path):
  raw = (gzip.open if str(path).endswith(".gz") else open)(path, "rb").read()
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

def test_an_unwritable_path_is_one_clear_error(tmp_path):
  with pytest.raises(OSError, match="cannot write the .rd capture"): Rig(rd=str(tmp_path / "missing" / "x.rd"))
