"""Units of Mesa's register fields in the bindings. MESA=path runs Mesa's own generator on its register database too, of any release."""
import importlib.util, os, pathlib, re, subprocess, sys, tempfile, unittest
from tinygrad.runtime import autogen
from tinygrad.runtime.autogen import mesa

# as gen_header.py writes fields: with a unit, in its own place or in a wider word; without one; not an integer; one bit
HEADER = """
#define REG_X_SIZE 0x0000a001
#define X_SIZE_BYTES__MASK 0x0000ff00
#define X_SIZE_BYTES__SHIFT 8
static inline uint32_t X_SIZE_BYTES(uint32_t val)
{
	assert(!(val & 0x1ff));
	return (((val >> 9)) << X_SIZE_BYTES__SHIFT) & X_SIZE_BYTES__MASK;
}
#define X_SIZE_COUNT__MASK 0x000000ff
#define X_SIZE_COUNT__SHIFT 0
static inline uint32_t X_SIZE_COUNT(uint32_t val)
{
	return ((val) << X_SIZE_COUNT__SHIFT) & X_SIZE_COUNT__MASK;
}
#define X_SIZE_LOD__MASK 0x000f0000
#define X_SIZE_LOD__SHIFT 16
static inline uint32_t X_SIZE_LOD(float val)
{
	return ((((int32_t)(val * 4.0))) << X_SIZE_LOD__SHIFT) & X_SIZE_LOD__MASK;
}
#define X_SIZE_ENABLED 0x80000000
#define X_BASE_ADDR__MASK 0xfffffffffffffffc
#define X_BASE_ADDR__SHIFT 2
static inline uint32_t X_BASE_ADDR(uint64_t val)
{
	assert(!(val & 0x3));
	return (((val >> 2)) << X_BASE_ADDR__SHIFT) & X_BASE_ADDR__MASK;
}
"""
INTS = {"X_SIZE_BYTES": range(0, 1 << 17, 512), "X_SIZE_COUNT": range(256), "X_BASE_ADDR": range(0, 1 << 20, 4092)}

def bindings(header:str) -> dict:
  """What the generator of the bindings makes of a header, in the way it makes mesa.py."""
  if not os.environ.get("LIBCLANG_PATH") and (spec:=importlib.util.find_spec("clang")) and spec.submodule_search_locations:
    found = [p for d in spec.submodule_search_locations for p in pathlib.Path(d).glob("native/libclang.*")]
    if found: os.environ["LIBCLANG_PATH"] = str(found[0])
  from tinygrad.runtime.support.autogen import gen
  with tempfile.TemporaryDirectory() as tmp:
    path = pathlib.Path(tmp)
    (path/"gen").mkdir()
    (path/"gen"/"x.xml.h").write_text(header)
    autogen.mesa_headers(tmp, ["true"])
    try: text = gen("x", [str(path/"gen"/"x.xml.h")])
    except AttributeError as e: raise unittest.SkipTest(f"libclang is needed: {e}") from e
  exec(text, ns:={}) # pylint: disable=exec-used
  return ns

class TestMesaUnits(unittest.TestCase):
  def test_units_of_the_compute_registers(self):
    for stage in ("VS", "HS", "DS", "GS", "PS", "CS"):
      self.assertEqual(getattr(mesa, f"A6XX_SP_{stage}_CONST_CONFIG_CONSTLEN__SHR"), 2)         # 4 vec4
      self.assertEqual(getattr(mesa, f"A6XX_SP_{stage}_PVT_MEM_STACK_OFFSET_OFFSET__SHR"), 11)  # 2 KiB
      self.assertEqual(getattr(mesa, f"A6XX_SP_{stage}_PVT_MEM_PARAM_MEMSIZEPERITEM__SHR"), 9)  # 512 bytes
      self.assertEqual(getattr(mesa, f"A6XX_SP_{stage}_PVT_MEM_SIZE_TOTALPVTMEMSIZE__SHR"), 12) # 4 KiB

  def test_generated_fields_compute_what_the_header_does(self):
    ns = bindings(HEADER)
    self.assertEqual({k for k in ns if k.endswith("__SHR")}, {"X_SIZE_BYTES__SHR", "X_BASE_ADDR__SHR"})
    def mine(f:str, v:int) -> int: return (v >> ns.get(f"{f}__SHR", 0) << ns[f"{f}__SHIFT"]) & ns[f"{f}__MASK"] & 0xffffffff
    claims = "".join(f'static_assert({f}({v}ull) == {mine(f, v)}u, "{f}({v})");\n' for f, vals in INTS.items() for v in vals)
    # as C++, the header's functions can be made constant expressions, so that the compiler computes them
    source = "typedef unsigned uint32_t; typedef int int32_t; typedef unsigned long long uint64_t;\n#define assert(x)\n#define inline constexpr\n"
    compiler = [os.environ.get("CC", "clang"), "-x", "c++", "-std=c++20", "-fsyntax-only", "-w", "-"]
    done = subprocess.run(compiler, input=source + HEADER + claims, text=True, stderr=subprocess.PIPE)
    self.assertEqual(done.returncode, 0, done.stderr[:2000])
    wrong = f'static_assert(X_SIZE_BYTES(512) == {mine("X_SIZE_BYTES", 512) + 1}u, "unit");'
    self.assertIn("unit", subprocess.run(compiler, input=source + HEADER + wrong, text=True, stderr=subprocess.PIPE).stderr)

  @unittest.skipUnless(os.environ.get("MESA"), "MESA=path of Mesa's source")
  def test_units_of_the_register_database(self):
    registers = pathlib.Path(os.environ["MESA"])/"src/freedreno/registers"
    def header(name:str) -> str:
      return subprocess.run([sys.executable, registers/"gen_header.py", "--rnn", registers, "--xml", registers/"adreno"/f"{name}.xml", "c-defines"],
                            check=True, stdout=subprocess.PIPE, text=True).stdout
    names = [n for n in ("a6xx", "adreno_pm4", "a6xx_descriptors") if (registers/"adreno"/f"{n}.xml").exists()]
    theirs = "".join(h + autogen.field_units(h) for h in map(header, names)).replace("#define ", "")
    # registers and fields are renamed from release to release, their places are not. An array's members have no place in mesa.py
    def units(text:str) -> dict[tuple, int]:
      fields, found, at = {}, {}, None
      for line in text.splitlines():
        if "REG_" in line: at = (m[1], int(m[2], 16)) if (m:=re.match(r"REG_([A-Z0-9]+)_\w+(?: = |\s+)(0x[0-9a-f]+)$", line)) else None
        elif m:=re.match(r"(\w+)__MASK(?: = |\s+)(0x[0-9a-f]+)$", line): fields[m[1]] = (at, int(m[2], 16))
        elif (m:=re.match(r"(\w+)__SHR(?: = |\s+)(\d+)$", line)) and fields[m[1]][0] is not None: found[fields[m[1]]] = int(m[2])
      return found
    found = units(theirs)
    self.assertGreater(len(found), 70)
    self.assertEqual(units(pathlib.Path(mesa.__file__).read_text()), found)

if __name__ == "__main__": unittest.main()
