"""
What this machine offers for an Adreno 630, what to do about each problem, and a self-test: `python -m tinygrad.runtime.support.qcom_doctor [--json]`.

Kernel requests are made with raw bytes here, not with the runtime's bindings, so that a fault in those cannot hide. Layouts: drm.h and msm_drm.h of
Linux 7.2; msm_kgsl.h of the 4.9 kernels. Nothing but the self-test, which is a process of its own, opens the GPU through the runtime.
"""
from __future__ import annotations
import contextlib, ctypes, dataclasses, errno, fcntl, glob, grp, importlib.metadata, importlib.util, json, os, pathlib, platform, re, shutil
import stat, struct, subprocess, sys
from collections.abc import Callable, Iterator
from typing import Any

DRM_VERSION, MSM_GET_PARAM, KGSL_GETPROPERTY = 0xc0406400, 0xc0186440, 0xc0180902
REQUESTS = {DRM_VERSION: "DRM_IOCTL_VERSION", MSM_GET_PARAM: "DRM_IOCTL_MSM_GET_PARAM", KGSL_GETPROPERTY: "IOCTL_KGSL_DEVICE_GETPROPERTY"}
MSM_PARAMS = {"gpu_id": 1, "gmem_bytes": 2, "chip_id": 3, "max_freq_hz": 4, "priorities": 7, "faults": 9, "suspends": 0xa, "va_start": 0xe,
              "va_size": 0xf}
CHIPS = {0x0603: "Adreno 630"}  # chip_id >> 16, as the runtime matches it
FIRMWARE = ("a630_sqe.fw", "a630_gmu.bin", "a630_zap.mbn")  # Linux adreno/a6xx_catalog.c; a board may have its zap shader in a folder of its own
KGSL_NODE, KGSL_SYSFS = "/dev/kgsl-3d0", "/sys/class/kgsl/kgsl-3d0"
Ioctl = Callable[[int, bytearray], object]

@dataclasses.dataclass
class Finding:
  """One line of the report. state: ok, note (nothing to do), problem. `remedy` says what to do about a problem."""
  subject: str
  state: str
  text: str
  remedy: str = ""
  facts: dict[str, Any] = dataclasses.field(default_factory=dict)

def errname(e: OSError) -> str: return errno.errorcode.get(e.errno or 0, str(e.errno))
def read(path: str) -> str:
  try: return pathlib.Path(path).read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
  except OSError: return ""

# *** device nodes

def drm_version(ioctl: Ioctl) -> tuple[str, str]:
  """(driver name, 'major.minor.patch') of an open DRM node. Raises OSError."""
  name = ctypes.create_string_buffer(64)
  arg = bytearray(struct.pack("=3i4xQQQQQQ", 0, 0, 0, 63, ctypes.addressof(name), 0, 0, 0, 0))
  ioctl(DRM_VERSION, arg)
  major, minor, patch = struct.unpack_from("=3i", arg)
  return name.value.decode(errors="replace"), f"{major}.{minor}.{patch}"

def msm_params(ioctl: Ioctl) -> dict[str, int | str]:
  """Every GET_PARAM value that the report shows (bytes, Hz, counts); the errno's name where the kernel does not know one. Raises OSError if a policy
  forbids the request."""
  found: dict[str, int | str] = {}
  for name, nr in MSM_PARAMS.items():
    arg = bytearray(struct.pack("=IIQII", 0x10, nr, 0, 0, 0))
    try: ioctl(MSM_GET_PARAM, arg)
    except OSError as e:
      if e.errno in (errno.EACCES, errno.EPERM): raise
      found[name] = errname(e)
    else: found[name] = struct.unpack_from("=Q", arg, 8)[0]
  return found

def kgsl_property(ioctl: Ioctl, prop: int, size: int) -> bytes:
  data = (ctypes.c_ubyte * size)()
  ioctl(KGSL_GETPROPERTY, bytearray(struct.pack("=I4xQQ", prop, ctypes.addressof(data), size)))
  return bytes(data)

def kgsl_info(ioctl: Ioctl) -> dict[str, Any]:
  """DEVICE_INFO (40 bytes) and VERSION (16 bytes) of an open KGSL node. Raises OSError."""
  device, chip, mmu, gmem_base, gpu, gmem = struct.unpack("=III4xQI4xQ", kgsl_property(ioctl, 1, 40))
  major, minor = struct.unpack_from("=II", kgsl_property(ioctl, 8, 16))
  return {"device_id": device, "chip_id": chip, "mmu_enabled": mmu, "gmem_base": gmem_base, "gpu_id": gpu, "gmem_bytes": gmem,
          "driver": "kgsl", "version": f"{major}.{minor}"}

def firmware() -> tuple[list[str], str]:
  """(files of FIRMWARE that are below /lib/firmware, where the zap shader is found by ending; names of what is missing)."""
  have = [os.path.basename(p) for p in glob.glob("/lib/firmware/**/*a6*", recursive=True) + glob.glob("/lib/firmware/qcom/**/*zap*", recursive=True)]
  def there(name: str) -> bool: return any(h.startswith(name) or ("zap" in name and "zap" in h) for h in have) # .xz and .zst are loaded as well
  return [f for f in FIRMWARE if there(f)], ", ".join(f for f in FIRMWARE if not there(f))

def chip_finding(subject: str, chip: int | str, facts: dict[str, Any]) -> Finding:
  if chip == "ENXIO":
    facts["firmware"], missing = firmware()
    what = f"missing below /lib/firmware: {missing}" if missing else f"{', '.join(FIRMWARE)} are there, so the board may want another one"
    return Finding(subject, "problem", "the msm driver runs, but no GPU is bound to it",
                   f"usually firmware ({what}); a630_zap.mbn is signed for the board and comes with its vendor's system. "
                   "`dmesg | grep -iE 'adreno|a630|msm'` names the file the kernel looked for; it must be there when the driver starts, so "
                   "perhaps in the initramfs", facts)
  if not isinstance(chip, int):
    return Finding(subject, "problem", f"the kernel does not tell the chip ({chip})", "update the kernel to 6.1 or newer", facts)
  if (name := CHIPS.get(chip >> 16)) is None:
    known = ", ".join(f"{n} ({c:#06x}xxxx)" for c, n in CHIPS.items())
    return Finding(subject, "problem", f"chip {chip:#010x} is not supported", f"supported: {known}", facts)
  return Finding(subject, "ok", f"{name}, chip {chip:#010x}", facts=facts)

def access_remedy(node: str, st: os.stat_result) -> str:
  """How this user gets to open `node`."""
  try: group = grp.getgrgid(st.st_gid).gr_name
  except KeyError: group = str(st.st_gid)
  if st.st_mode & stat.S_IWGRP and st.st_gid not in (os.getgid(), *os.getgroups()): return f"sudo usermod -aG {group} $USER, then log in again"
  if not st.st_mode & stat.S_IWGRP:
    rule = f'KERNEL=="{os.path.basename(node)}", GROUP="{group}", MODE="0660"'
    return f"the node is closed to its group {group}; a udev rule such as {rule} opens it"
  return f"the file mode allows it, so {policy()} does not; `ls -Z {node}` and `dmesg | grep -i denied` tell"

def policy() -> str:
  """What may stand between an open node and its user."""
  if read("/sys/fs/selinux/enforce") == "1": return f"SELinux, which is enforcing (context {read('/proc/self/attr/current') or 'unknown'}),"
  return "a security module (SELinux, AppArmor), a seccomp filter or a container's device list"

@contextlib.contextmanager
def opened(node: str) -> Iterator[Ioctl]:
  fd = os.open(node, os.O_RDWR | os.O_CLOEXEC)
  try: yield lambda request, arg: fcntl.ioctl(fd, request, arg, True)
  finally: os.close(fd)

def probe(node: str, facts_of: Callable[[str, Ioctl, dict[str, Any]], Finding]) -> Finding:
  """Opens `node` and lets `facts_of` ask it; a refusal becomes a finding with its remedy."""
  st, asked, facts = os.stat(node), list[int](), dict[str, Any]()
  facts |= {"mode": stat.filemode(st.st_mode), "uid": st.st_uid, "gid": st.st_gid}
  try:
    with opened(node) as ioctl:
      def ask(request: int, arg: bytearray) -> object:
        asked.append(request)
        return ioctl(request, arg)
      return facts_of(node, ask, facts)
  except OSError as e:
    forbidden = e.errno in (errno.EACCES, errno.EPERM)
    if not asked:
      remedy = access_remedy(node, st) if forbidden else "the driver behind the node is gone or not ready; see dmesg"
      return Finding(node, "problem", f"cannot be opened: {errname(e)} ({facts['mode']})", remedy, facts)
    remedy = f"the node opens, so its group is right, but {policy()} forbids the request: allow it; `dmesg | grep -i denied` has the rule"
    return Finding(node, "problem", f"refuses {REQUESTS.get(asked[-1], hex(asked[-1]))}: {errname(e)}",
                   remedy if forbidden else "not the expected driver; see dmesg", facts)

def drm_node(node: str, ioctl: Ioctl, facts: dict[str, Any]) -> Finding:
  name, version = drm_version(ioctl)
  facts |= {"driver": name, "version": version}
  if name != "msm": return Finding(node, "note", f"driver {name} {version}: another GPU", facts=facts)
  facts |= msm_params(ioctl)
  found = chip_finding(node, facts["chip_id"], facts)
  if found.state != "ok": return found
  def num(key: str) -> int: return v if isinstance(v := facts[key], int) else 0
  said = [f"msm {version}", f"{num('gmem_bytes') >> 10} KiB of GMEM", f"{num('priorities')} priorities"]
  if num("max_freq_hz"): said.append(f"up to {num('max_freq_hz') / 1e6:.0f} MHz")
  said.append(f"{num('va_size') / 2**30:.0f} GiB of GPU addresses" if num("va_size") else
              "address space shared with the kernel and other processes (no private page table)")
  said.append(f"{num('faults')} hang recoveries and {num('suspends')} suspends since boot")
  found.text += ", " + ", ".join(said)
  return found

def kgsl_node(node: str, ioctl: Ioctl, facts: dict[str, Any]) -> Finding:
  facts |= kgsl_info(ioctl)
  found = chip_finding(node, facts["chip_id"], facts)
  if found.state == "ok": found.text += f", kgsl {facts['version']}, {facts['gmem_bytes'] >> 10} KiB of GMEM"
  return found

def asked() -> str:
  """The user's DEV, if it names a real Adreno."""
  return dev if "QCOM" in (dev := os.environ.get("DEV", "")) and "MOCK" not in dev else ""

def container() -> bool:
  """Docker's and Podman's marks, and what systemd says. A chroot has none."""
  return any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")))

def devices() -> list[Finding]:
  """One finding per GPU node of this machine, or one that says there is none."""
  found = [probe(node, drm_node) for node in sorted(glob.glob("/dev/dri/renderD*"))]
  if os.path.exists(KGSL_NODE): found.append(probe(KGSL_NODE, kgsl_node))
  if not found:
    remedy = ""
    if "sdm845" in read("/proc/device-tree/compatible"):
      remedy = "this is an SDM845: enable CONFIG_DRM_MSM, and the gpu node (&gpu, &gmu, zap-shader) in the board's device tree"
    elif asked(): remedy = f"DEV={asked()} needs a machine with an Adreno 630; DEV=MOCKMSM+QCOM is the virtual one of a source tree"
    state = "problem" if remedy else "note" # a container may well be one without a GPU
    if container(): remedy = "; ".join(filter(None, ["this is a container: pass /dev/dri (or /dev/kgsl-3d0) into it", remedy]))
    found.append(Finding("device nodes", state, "no /dev/dri/renderD* and no /dev/kgsl-3d0", remedy))
  return found

def clocks() -> list[Finding]:
  """Clocks as sysfs has them, in Hz: devfreq on mainline, KGSL's own attributes downstream."""
  found = []
  for folder, names in [(d, ("governor", "cur_freq", "min_freq", "max_freq")) for d in glob.glob("/sys/class/devfreq/*gpu*")] + \
                       [(KGSL_SYSFS, ("gpuclk", "max_gpuclk", "gpu_busy_percentage", "temp", "reset_count"))]:
    if facts := {n: v for n in names if (v := read(f"{folder}/{n}"))}:
      found.append(Finding("clocks", "note", f"{folder}: " + ", ".join(f"{n} {v}" for n, v in facts.items()), facts=facts))
  return found

def dumps() -> list[Finding]:
  """Traces that an earlier GPU hang left."""
  paths = [*glob.glob("/sys/class/devcoredump/devcd*/data"), *glob.glob(f"{KGSL_SYSFS}/snapshot/dump")]
  waiting = [p for p in paths if "devcoredump" in p or (os.access(p, os.R_OK) and pathlib.Path(p).read_bytes()[:1])]
  return [Finding("core dumps", "note", f"{', '.join(waiting)} (root reads it; writing to it discards it)")] if waiting else []

# *** host

def installed() -> str:
  """Version and kind of the tinygrad this module belongs to."""
  package = pathlib.Path(sys.modules["tinygrad"].__path__[0])
  with contextlib.suppress(importlib.metadata.PackageNotFoundError, OSError):
    dist = importlib.metadata.distribution("tinygrad")
    if pathlib.Path(str(dist.locate_file("tinygrad/device.py"))).samefile(package / "device.py"): return f"tinygrad {dist.version}, installed"
  found = re.search(r'^version = "(.+)"', read(str(package.parent / "pyproject.toml")), re.M)
  return f"tinygrad {found[1] if found else 'of unknown version'}, source tree"

def writable(subject: str, path: str, remedy: str) -> Finding:
  """Whether files can be made at `path`, which need not exist yet."""
  q = pathlib.Path(path)
  at = next(p for p in (q, *q.parents) if p.exists())
  if not os.access(at, os.W_OK | os.X_OK): return Finding(subject, "problem", f"{path} cannot be written", remedy)
  size, free = sum(f.stat().st_size for f in q.rglob("*") if f.is_file()) if q.is_dir() else 0, shutil.disk_usage(at).free
  if free < 64 << 20: return Finding(subject, "problem", f"{path}: {free / 2**20:.1f} MiB are free", "make room, at least 64 MiB: " + remedy)
  return Finding(subject, "ok", f"{path} ({size / 2**20:.1f} MiB)", facts={"bytes": size})

def compiler() -> Finding:
  """The C compiler that the CPU device, and through it the submitter, is compiled with, tried as tinygrad uses it."""
  from tinygrad.device import Device
  from tinygrad.runtime.support.compiler_cpu import ClangCompiler
  name = os.environ.get("CC", "clang")
  if (path := shutil.which(name)) is None: return Finding("clang", "problem", f"{name} is not on PATH", "install clang, or set CC to one")
  try: ClangCompiler(str(Device["CPU"].arch).split(",")).compile("float f(float x) { return x * 2; }")
  except (OSError, subprocess.CalledProcessError) as e:
    return Finding("clang", "problem", f"{path} does not compile: {e}", "set CC to a clang that does")
  shown = re.search(r"\bversion (\S+)", subprocess.run([path, "--version"], capture_output=True, text=True).stdout)
  return Finding("clang", "ok", f"{path} ({shown[1] if shown else 'no version'})")

def mesa() -> Finding:
  """The library with the IR3 compiler, loaded as tinygrad loads it."""
  from tinygrad.runtime.support.compiler_mesa import IR3Compiler
  from tinygrad.runtime.autogen import mesa as lib
  if (path := os.environ.get("MESA_PATH")) and not os.path.isfile(path): # tinygrad looks elsewhere then, without a word
    return Finding("Mesa", "problem", f"MESA_PATH={path} is no file", "set MESA_PATH to a libtinymesa.so, or unset it for that of tinymesa")
  try: IR3Compiler("a630")
  except (AttributeError, RuntimeError) as e:
    return Finding("Mesa", "problem", f"no usable Mesa library: {e}",
                   "pip install tinymesa==25.2.7.2, or set MESA_PATH to a libtinymesa.so; it needs glibc 2.32 or newer")
  version = ""
  with contextlib.suppress(importlib.metadata.PackageNotFoundError): version = f"tinymesa {importlib.metadata.version('tinymesa')}, "
  return Finding("Mesa", "ok", f"{'' if os.environ.get('MESA_PATH') else version}{lib.dll._name}")

def host() -> list[Finding]:
  dt = read("/proc/device-tree/compatible")
  found = [Finding("system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}" + (f", {dt}" if dt else ""),
                   facts={"kernel": platform.release(), "machine": platform.machine()})]
  release = tuple(int(x) for x in platform.release().split("-")[0].split(".")[:2] if x.isdigit())
  if glob.glob("/sys/module/msm*") and release < (6, 1):
    found.append(Finding("kernel", "problem", f"msm in Linux {platform.release()} is older than what the runtime needs", "Linux 6.1 or newer"))
  found += [Finding("stack", "ok", f"{installed()}, Python {platform.python_version()}"), compiler(), mesa()]
  from tinygrad.helpers import CACHEDB
  found.append(writable("kernel cache", os.path.dirname(CACHEDB), "set XDG_CACHE_HOME or CACHEDB to a place of yours"))
  return found

# *** self-test

def selftest_main() -> None:
  """One JSON line per test on the default device: exact results of small integers. Runs in a process of its own; IMAGE=1 adds the test of images."""
  from tinygrad import Device, Tensor, TinyJit
  from tinygrad.helpers import IMAGE
  dev: Any = Device[Device.DEFAULT]
  def said(test: str, ok: bool, **facts: Any) -> None: print(json.dumps({"test": test, "ok": ok, **facts}), flush=True)
  rows = range(48)
  a, b = ([[(i * p + j * q) % 13 - 6 for j in rows] for i in rows] for p, q in ((5, 3), (7, 11)))
  product = [[sum(a[i][k] * b[k][j] for k in rows) for j in rows] for i in rows]
  said("open", True, device=Device.DEFAULT, arch=dev.renderer.target.arch, interface=type(dev.iface).__name__ if hasattr(dev, "iface") else "")
  ta, tb = (Tensor([[float(x) for x in row] for row in m]).realize() for m in (a, b))
  if IMAGE:
    out = (ta @ tb).tolist()
    from tinygrad.runtime.ops_qcom import programs
    used = sum(p.tex_cnt > 0 for p in programs.values())
    return said("image", out == product and used > 0, kernels_with_textures=used)
  said("add", (ta + tb).tolist() == [[x + y for x, y in zip(*r)] for r in zip(a, b)])
  said("matmul", (ta @ tb).tolist() == product)
  @TinyJit
  def step(x: Tensor) -> Tensor: return ((x + 1).contiguous() * 2).realize()
  wrong = [i for i in range(24) if step((ta + i).contiguous().realize()).tolist() != [[(x + i + 1) * 2 for x in r] for r in a]]
  said("replay", not wrong, replays=24, wrong=wrong)

TESTS = {0: ("add", "matmul", "replay"), 1: ("image",)} # by IMAGE, which a device is asked for when it opens

def selftest(dev: str, timeout_s: float = 600) -> Iterator[Finding]:
  """add, matmul, 24 replays and images on `dev`, exact, in child processes: a hang or a crash there is a finding here."""
  what = "the VIRTUAL Adreno 630, no hardware was used" if "MOCK" in dev else "the real device"
  for image, names in TESTS.items():
    if live := sys.stderr.isatty(): print(f"\r\033[K  ...  self-test on {what}: {', '.join(names)}", end="", file=sys.stderr, flush=True)
    found = _selftest(dev, image, what, timeout_s)
    if live: print("\r\033[K", end="", file=sys.stderr, flush=True)
    yield from found
    if found[-1].subject == "self-test": return # it does not open, with images neither

def _selftest(dev: str, image: int, what: str, timeout_s: float) -> list[Finding]:
  env = {**os.environ, "DEV": dev, "IMAGE": str(image), "PARALLEL": "0", "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
  cmd = [sys.executable, "-m", __spec__.name if __name__ == "__main__" else __name__, "--selftest"]
  try:
    done = subprocess.run(cmd, capture_output=True, text=True, env=env, timeout=timeout_s, stdin=subprocess.DEVNULL)
    out, err, code = done.stdout, done.stderr, done.returncode
  except subprocess.TimeoutExpired as e:
    out, err, code = (e.stdout or b"").decode(), f"no result within {timeout_s:.0f} s: the GPU hangs? See dmesg and the core dump", 1
  python = "./dev run" if pathlib.Path(__file__).resolve().parents[3].joinpath("dev").is_file() else "python3" # a clone's file, or a package's
  results = {r["test"]: r for line in out.splitlines() if line.startswith('{"test"') for r in [json.loads(line)]}
  lines = err.strip().splitlines()
  said = lines[-1] if lines else f"ended by signal {-code}" if code < 0 else f"status {code}"
  repeat, found = f"repeat with more output: DEV={dev} IMAGE={image} DEBUG=2 {python} -m {cmd[2]} --selftest", list[Finding]()
  if "open" not in results:
    return [Finding("self-test", "problem", f"DEV={dev} does not open: {said}", repeat, {"DEV": dev, "stderr": lines[-20:]})]
  passed = "note" if "MOCK" in dev else "ok" # the virtual device says nothing of this machine
  for t in TESTS[image]:
    facts = {**results["open"], **results.get(t, {}), "DEV": dev}
    if t in results and results[t]["ok"]: found.append(Finding(f"self-test {t}", passed, f"DEV={dev}: exact on {what}", facts=facts))
    elif t in results: found.append(Finding(f"self-test {t}", "problem", f"DEV={dev}: WRONG RESULT on {what}", repeat, facts))
    else: return [*found, Finding(f"self-test {t}", "problem", f"DEV={dev}: {said}", repeat, {**facts, "stderr": lines[-20:]})]
  return found

def choose(found: list[Finding]) -> str | None:
  """DEV for the self-test: the user's own if it names QCOM, else the node that works, mainline first, else the virtual device, which comes with a
  source tree only. None if there is none, or where the user's own can't open for a reason that is among the findings."""
  usable = [f.subject for f in found if f.state == "ok"]
  if "QCOM" in (dev := os.environ.get("DEV", "")):
    other = KGSL_NODE if dev.startswith("MSM+") else "/dev/dri/" if dev.startswith("KGSL+") else "no node"
    states = {f.state for f in found if not f.subject.startswith(other)}
    return None if asked() and "ok" not in states and "problem" in states else dev
  if any("/dri/" in n for n in usable): return "MSM+QCOM"
  if KGSL_NODE in usable: return "KGSL+QCOM"
  try: return "MOCKMSM+QCOM" if importlib.util.find_spec("test.mockgpu.qcom") else None
  except ModuleNotFoundError: return None

def show(f: Finding) -> str:
  mark = {"ok": "  ok ", "note": "  -- ", "problem": " !!  "}[f.state]
  return f"{mark}{f.subject}: {f.text}" + (f"\n       -> {f.remedy}" if f.remedy else "")

def main(args: list[str]) -> int:
  """Exit status 0 if nothing needs to be done, also on a machine without an Adreno 630; 1 otherwise, 2 for wrong arguments."""
  if args == ["--selftest"]:
    selftest_main()
    return 0
  if args not in ([], ["--json"]):
    print("usage: [--json | --selftest]", file=sys.stderr)
    return 2
  nodes = devices()
  report = [*host(), *nodes, *clocks(), *dumps()]
  if not args: print(*map(show, report), sep="\n", flush=True)
  none = Finding("self-test", "note", f"not run: DEV={asked()} can't open, see above" if asked() else "not run: no usable Adreno 630 in this machine")
  adreno = any(f.state == "ok" for f in nodes)
  if any(f.state == "problem" and f.subject == "clang" for f in report): none.text, dev = "not run without a C compiler, see above", None
  else: dev = choose(nodes)
  for test in selftest(dev) if dev else [none]:
    if not args: print(show(test), flush=True)
    report.append(test)
  problems = [f for f in report if f.state == "problem"]
  if args:
    text = json.dumps({"ok": not problems, "adreno": adreno, "findings": [dataclasses.asdict(f) for f in report]}, indent=2)
    home = os.path.expanduser("~/")
    print(text.replace(home, "~/") if len(home) > 2 else text) # it goes into public reports
  else:
    count = f"{len(problems)} problem(s)" if problems else "ok" if adreno else "no other problem"
    print(f"doctor: {'' if adreno else 'NO RESULT FOR HARDWARE, no usable Adreno 630 in this machine; '}{count}")
  return 1 if problems else 0

if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
