"""`dev doctor`: what this machine offers for an Adreno 630, what to do about each problem, and a self-test.

Kernel requests are made with raw bytes here, not with the runtime's bindings, so that a fault in those cannot hide. Layouts: drm.h and msm_drm.h of
Linux 7.2; msm_kgsl.h of the 4.9 kernels."""
from __future__ import annotations
import ctypes, dataclasses, errno, fcntl, glob, grp, json, os, pathlib, platform, pwd, re, stat, struct, subprocess
from collections.abc import Callable
from typing import Any
from stack import env, series as ser
from stack.env import BUILD, PYTHON, Problem, VENV

DRM_VERSION, MSM_GET_PARAM, KGSL_GETPROPERTY = 0xc0406400, 0xc0186440, 0xc0180902
MSM_PARAMS = {"gpu_id": 1, "gmem_bytes": 2, "chip_id": 3, "max_freq_hz": 4, "priorities": 7, "faults": 9, "suspends": 0xa, "va_start": 0xe,
              "va_size": 0xf}
CHIPS = {0x0603: "Adreno 630"}  # chip_id >> 16, as the runtime matches it
Ioctl = Callable[[int, bytearray], object]

@dataclasses.dataclass
class Finding:
  """One line of the report. state: ok, note (nothing to do), problem. `remedy` says what to do about a problem."""
  subject: str
  state: str
  text: str
  remedy: str = ""
  facts: dict[str, Any] = dataclasses.field(default_factory=dict)

# *** device nodes ***

def drm_version(ioctl: Ioctl) -> tuple[str, str]:
  """(driver name, 'major.minor.patch') of an open DRM node. Raises OSError."""
  name = ctypes.create_string_buffer(64)
  arg = bytearray(struct.pack("=3i4xQQQQQQ", 0, 0, 0, 63, ctypes.addressof(name), 0, 0, 0, 0))
  ioctl(DRM_VERSION, arg)
  major, minor, patch = struct.unpack_from("=3i", arg)
  return name.value.decode(errors="replace"), f"{major}.{minor}.{patch}"

def msm_params(ioctl: Ioctl) -> dict[str, int | str]:
  """Every GET_PARAM value that doctor shows; the errno name where the kernel refuses one."""
  found: dict[str, int | str] = {}
  for name, nr in MSM_PARAMS.items():
    arg = bytearray(struct.pack("=IIQII", 0x10, nr, 0, 0, 0))
    try: ioctl(MSM_GET_PARAM, arg)
    except OSError as e: found[name] = errno.errorcode.get(e.errno or 0, str(e.errno))
    else: found[name] = struct.unpack_from("=Q", arg, 8)[0]
  return found

def kgsl_info(ioctl: Ioctl) -> dict[str, int]:
  """DEVICE_INFO of an open KGSL node (40 bytes). Raises OSError."""
  info = (ctypes.c_ubyte * 40)()
  ioctl(KGSL_GETPROPERTY, bytearray(struct.pack("=I4xQQ", 1, ctypes.addressof(info), 40)))
  device, chip, mmu, gmem_base, gpu, gmem = struct.unpack("=III4xQI4xQ", bytes(info))
  return {"device_id": device, "chip_id": chip, "mmu_enabled": mmu, "gmem_base": gmem_base, "gpu_id": gpu, "gmem_bytes": gmem}

def chip_finding(subject: str, chip: int | str, facts: dict[str, Any]) -> Finding:
  if chip == "ENXIO":
    return Finding(subject, "problem", "the msm driver runs, but no GPU is bound to it",
                   "usually missing firmware: a630_sqe.fw, a630_gmu.bin and the board's "
                   "a630_zap.mbn below /lib/firmware/qcom; `dmesg | grep -iE 'adreno|a630|msm'` names the file it looked for", facts)
  if not isinstance(chip, int):
    return Finding(subject, "problem", f"the kernel does not tell the chip ({chip})", "update the kernel to 6.1 or newer", facts)
  name = CHIPS.get(chip >> 16)
  if name is None:
    known = ", ".join(f"{n} ({c:#06x}xxxx)" for c, n in CHIPS.items())
    return Finding(subject, "problem", f"chip {chip:#010x} is not supported", f"supported: {known}", facts)
  return Finding(subject, "ok", f"{name}, chip {chip:#010x}", facts=facts)

def access_remedy(node: str, st: os.stat_result) -> str:
  """How this user gets to open `node`."""
  try: group = grp.getgrgid(st.st_gid).gr_name
  except KeyError: group = str(st.st_gid)
  try: user = pwd.getpwuid(os.getuid()).pw_name
  except KeyError: user = str(os.getuid())
  if st.st_mode & stat.S_IWGRP and st.st_gid not in (os.getgid(), *os.getgroups()): return f"sudo usermod -aG {group} {user}, then log in again"
  if not st.st_mode & stat.S_IWGRP:
    rule = f'KERNEL=="{os.path.basename(node)}", GROUP="{group}", MODE="0660"'
    return f"the node is closed to its group {group}; a udev rule such as {rule} opens it"
  return "the file mode allows it, so a security module (SELinux, a container's device list) does not; `ls -Z` and `dmesg` tell"

def probe(node: str, facts_of: Callable[[Ioctl, dict[str, Any]], Finding]) -> Finding:
  """Opens `node` and lets `facts_of` ask it; a refusal becomes a finding with its remedy."""
  st = os.stat(node)
  facts: dict[str, Any] = {"mode": stat.filemode(st.st_mode), "uid": st.st_uid, "gid": st.st_gid}
  try: fd = os.open(node, os.O_RDWR | os.O_CLOEXEC)
  except OSError as e:
    remedy = access_remedy(node, st) if e.errno in (errno.EACCES, errno.EPERM) else "the driver behind the node is gone or not ready; see dmesg"
    return Finding(node, "problem", f"cannot be opened: {errno.errorcode.get(e.errno or 0)} ({facts['mode']})", remedy, facts)
  def ioctl(request: int, arg: bytearray) -> object: return fcntl.ioctl(fd, request, arg, True)
  try: return facts_of(ioctl, facts)
  except OSError as e:
    return Finding(node, "problem", f"refuses a request: {errno.errorcode.get(e.errno or 0)}", "not the expected driver; see dmesg", facts)
  finally: os.close(fd)

def drm_node(node: str, ioctl: Ioctl, facts: dict[str, Any]) -> Finding:
  name, version = drm_version(ioctl)
  facts |= {"driver": name, "version": version}
  if name != "msm": return Finding(node, "note", f"driver {name} {version}: another GPU", facts=facts)
  facts |= msm_params(ioctl)
  found = chip_finding(node, facts["chip_id"], facts)
  if found.state == "ok":
    found.text += f", msm {version}" + (f", {facts['max_freq_hz'] / 1e6:.0f} MHz" if isinstance(facts["max_freq_hz"], int) else "")
    if isinstance(facts["va_size"], int): found.text += f", {facts['va_size'] / 2**30:.0f} GiB of GPU addresses"
    else: found.text += ", address space shared with the kernel and other processes (no private page table)"
    if isinstance(facts["faults"], int) and facts["faults"]:
      found.text += f", {facts['faults']} hang recoveries since boot"
  return found

def kgsl_node(node: str, ioctl: Ioctl, facts: dict[str, Any]) -> Finding:
  facts |= kgsl_info(ioctl)
  return chip_finding(node, facts["chip_id"], facts)

def devices() -> list[Finding]:
  """One finding per GPU node of this machine, or one that says there is none."""
  found = [probe(node, lambda i, f, node=node: drm_node(node, i, f)) for node in sorted(glob.glob("/dev/dri/renderD*"))]  # type: ignore[misc]
  if os.path.exists(node := "/dev/kgsl-3d0"): found.append(probe(node, lambda i, f: kgsl_node(node, i, f)))
  if not found:
    text, remedy = "no /dev/dri/renderD* and no /dev/kgsl-3d0", ""
    if "sdm845" in device_tree():
      remedy = "this is an SDM845: enable CONFIG_DRM_MSM, and the gpu node (&gpu, &gmu, zap-shader) in the board's device tree"
    found.append(Finding("device nodes", "problem" if remedy else "note", text, remedy))
  return found

def device_tree() -> str:
  try: return pathlib.Path("/proc/device-tree/compatible").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
  except OSError: return ""

def dumps() -> list[Finding]:
  """Traces that an earlier GPU hang left."""
  paths = [*glob.glob("/sys/class/devcoredump/devcd*/data"), *(p for p in glob.glob("/sys/class/kgsl/kgsl-3d0/snapshot/dump"))]
  return [Finding("core dumps", "note", f"{', '.join(paths)} (root reads it; writing to it discards it)")] if any(map(dump_waits, paths)) else []

def dump_waits(path: str) -> bool:
  return "devcoredump" in path or (os.access(path, os.R_OK) and bool(pathlib.Path(path).read_bytes()[:1]))

# *** host ***

def host() -> list[Finding]:
  found = [Finding("system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}" + (f", {dt}" if (dt := device_tree()) else ""))]
  release = tuple(int(x) for x in platform.release().split("-")[0].split(".")[:2] if x.isdigit())
  if any(glob.glob("/sys/module/msm*")) and release < (6, 1):
    found.append(Finding("kernel", "problem", f"msm in Linux {platform.release()} is older than what the runtime needs", "Linux 6.1 or newer"))
  series = ser.load()
  version = f"tinygrad {series.base}+msm.{series.release}"
  found.append(Finding("stack", "ok", f"{version}, {len(series.entries)} commits, Python {platform.python_version()}"))
  cc = env.clang()
  shown = re.search(r"\bversion (\S+)", subprocess.run([cc, "--version"], capture_output=True, text=True).stdout)
  source = ", from .venv: the system has none" if str(VENV) in cc else ""
  found.append(Finding("clang", "ok", f"{cc} ({shown[1] if shown else 'no version'}){source}"))
  found.append(mesa())
  cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tinygrad"
  size = sum(f.stat().st_size for f in cache.rglob("*") if f.is_file()) if cache.is_dir() else 0
  at = next(p for p in (cache, *cache.parents) if p.exists())
  if os.access(at, os.W_OK): found.append(Finding("kernel cache", "ok", f"{cache} ({size / 2**20:.1f} MiB)"))
  else: found.append(Finding("kernel cache", "problem", f"{cache} cannot be written", "set XDG_CACHE_HOME to a folder of yours"))
  return found

def mesa() -> Finding:
  """The library with the IR3 compiler, as tinygrad looks for it: MESA_PATH, else the tinymesa package."""
  if (path := os.environ.get("MESA_PATH")) and os.path.isfile(path): return Finding("Mesa", "ok", f"{path} (MESA_PATH)")
  for lib in VENV.glob("lib/python3*/site-packages/tinymesa/libtinymesa.so"):
    version = next(iter(lib.parent.parent.glob("tinymesa-*.dist-info"))).name.split("-")[1].removesuffix(".dist")
    try: ctypes.CDLL(str(lib))
    except OSError as e: return Finding("Mesa", "problem", f"tinymesa {version} does not load: {e}", "it needs glibc 2.32 or newer")
    return Finding("Mesa", "ok", f"tinymesa {version} ({lib})")
  return Finding("Mesa", "problem", "no tinymesa library", "pip install tinymesa, or set MESA_PATH to a libtinymesa.so")

# *** self-test ***

SELFTEST = '''
import json, sys
import numpy as np
from tinygrad import Device, Tensor, TinyJit
dev = Device[Device.DEFAULT]
rng = np.random.default_rng(0)
a, b = rng.integers(-8, 8, (2, 48, 48)).astype(np.float32)
assert np.array_equal((Tensor(a) + Tensor(b)).numpy(), a + b), "add is wrong"
assert np.array_equal((Tensor(a) @ Tensor(b)).numpy(), a @ b), "matmul is wrong"
@TinyJit
def step(x): return ((x + 1).contiguous() * 2).realize()
for i in range(24):
  x = a + i
  assert np.array_equal(step(Tensor(x).realize()).numpy(), (x + 1) * 2), f"replay {i} is wrong"
iface = type(getattr(dev, "iface", None)).__name__
print(json.dumps({"device": Device.DEFAULT, "arch": getattr(dev.renderer.target, "arch", ""), "interface": iface}))
'''

def selftest(dev: str) -> Finding:
  """add, matmul and 24 replays on `dev`, compared with numpy, in a child process: a hang or a crash there is a finding here."""
  subject = "self-test"
  child = {**env.environment(), "DEV": dev, "PARALLEL": "0"}
  cmd = [str(PYTHON), "-c", SELFTEST]
  try: done = subprocess.run(cmd, capture_output=True, text=True, env=child, cwd=BUILD, timeout=300, stdin=subprocess.DEVNULL)
  except subprocess.TimeoutExpired:
    return Finding(subject, "problem", f"DEV={dev}: no result within 300 s", "the GPU hangs: see dmesg and the core dump")
  if done.returncode == 0:
    facts = json.loads(done.stdout.splitlines()[-1])
    what = "the VIRTUAL Adreno 630, no hardware was used" if "MOCK" in dev else "the real device"
    return Finding(subject, "ok", f"DEV={dev}: add, matmul and 24 replays are right on {what}", facts=facts)
  lines = done.stderr.strip().splitlines()
  said = lines[-1] if lines else f"ended by signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
  repeat = f"repeat with more output: DEV={dev} DEBUG=2 ./dev test -n 0 test/test_tiny.py"
  return Finding(subject, "problem", f"DEV={dev}: {said}", repeat, {"stderr": lines[-20:]})

def choose(found: list[Finding]) -> str:
  """DEV for the self-test: the user's own if it names QCOM, else the node that works, mainline first, else the virtual device."""
  if "QCOM" in (dev := os.environ.get("DEV", "")): return dev
  usable = [f.subject for f in found if f.state == "ok"]
  return "MSM+QCOM" if any("/dri/" in n for n in usable) else "KGSL+QCOM" if "/dev/kgsl-3d0" in usable else "MOCKMSM+QCOM"

def main(args: list[str]) -> int:
  """dev doctor [--json]. Exit status 0 if nothing needs to be done, 1 otherwise."""
  if args not in ([], ["--json"]): raise Problem("usage: dev doctor [--json]")
  nodes = devices()
  report = [*host(), *nodes, *dumps()]
  if not args: print(*map(show, report), sep="\n", flush=True)
  report.append(test := selftest(choose(nodes)))
  problems = [f for f in report if f.state == "problem"]
  if args: print(json.dumps({"ok": not problems, "findings": [dataclasses.asdict(f) for f in report]}, indent=2))
  else:
    print(show(test))
    none = "" if any(f.state == "ok" for f in nodes) else "; no usable Adreno 630 in this machine"
    print(f"doctor: {f'{len(problems)} problem(s)' if problems else 'ok'}{none}")
  return 1 if problems else 0

def show(f: Finding) -> str:
  mark = {"ok": "  ok ", "note": "  -- ", "problem": " !!  "}[f.state]
  return f"{mark}{f.subject}: {f.text}" + (f"\n       -> {f.remedy}" if f.remedy else "")
