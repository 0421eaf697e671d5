"""Set-up of this clone: .venv with pinned requirements, the unmodified tinygrad, a C compiler, and the environment that commands run in."""
from __future__ import annotations
import collections, contextlib, fcntl, hashlib, os, pathlib, platform, shutil, subprocess, sys, sysconfig, tempfile, threading, time
from collections.abc import Iterator, Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD, VENV = ROOT / "build", ROOT / ".venv"
DOWNLOADS, TREE = BUILD / "dl", BUILD / "tree"
REQUIREMENTS, NODEPS, BASE = ROOT / "requirements.txt", ROOT / "requirements-nodeps.txt", ROOT / "base.txt"
PYTHON = VENV / "bin" / "python"

class Problem(Exception):
  """Something the user can act on: printed as one message, without a traceback. Its text names the cause and the remedy."""

def say(text: str) -> None: print(f"dev: {text}", file=sys.stderr, flush=True)

def digest(*files: pathlib.Path, salt: str = "") -> str:
  """sha256 over names and contents of `files`."""
  h = hashlib.sha256(salt.encode())
  for f in files: h.update(f"{f.name}\0".encode() + hashlib.sha256(f.read_bytes()).digest())
  return h.hexdigest()

@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
  """One process at a time: several `dev` commands may start at once on one clone."""
  BUILD.mkdir(exist_ok=True)
  with open(BUILD / f".{name}.lock", "w") as f:
    try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      say(f"waiting for another dev command to finish its {name}")
      fcntl.flock(f, fcntl.LOCK_EX)
    yield

@contextlib.contextmanager
def written_whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """A name to create a file or link under, which then replaces `path` in one step: any number of threads and processes may do so at once, and one
  that is interrupted leaves what was there."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as tmp:
    yield (part := pathlib.Path(tmp) / path.name)
    part.replace(path)

def output_folder(path: pathlib.Path) -> pathlib.Path:
  """`path`, which is made if need be. Raises Problem if no file can be written there."""
  try:
    path.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path).close()
  except OSError as e: raise Problem(f"{path} is no folder to write to ({e.strerror}); name another one") from e
  return path

class Line:
  """A line on a terminal's stderr that replaces itself; nothing where stderr is no terminal."""
  def __init__(self) -> None: self.live = sys.stderr.isatty()
  def show(self, text: str) -> None:
    if self.live: print(f"\r\033[K{text[:shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
  def clear(self) -> None:
    """Before a line of output, and at the end."""
    self.show("")

class Progress(Line):
  """How far work of `total` steps is that takes minutes."""
  def __init__(self, what: str, total: int):
    super().__init__()
    self.what, self.total, self.done, self.start, self.lock = what, total, 0, time.monotonic(), threading.Lock()
    self.step(0)
  def step(self, n: int = 1) -> None:
    with self.lock:
      self.done += n
      self.show(f"  {self.what}: {self.done} of {self.total}, {time.monotonic() - self.start:.0f} s")

def run_step(what: str, cmd: list[str | os.PathLike[str]], remedy: str) -> None:
  """Runs one set-up command. On a terminal its newest line of output is shown while it runs, elsewhere a sign of life every 20 s; Problem has its
  last lines if it fails."""
  say(f"{what} ...")
  start = shown = time.monotonic()
  tail: collections.deque[str] = collections.deque(maxlen=12)
  newest = Line()
  with subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL) as child:
    try:
      for line in child.stdout or ():
        tail.append(line.rstrip())
        newest.show(f"  {line.strip()}")
        if not newest.live and time.monotonic() - shown > 20:
          say(f"{what}: {time.monotonic() - start:.0f} s, {line.strip()[:100]}")
          shown = time.monotonic()
    except KeyboardInterrupt:
      child.terminate()
      raise
  newest.clear()
  if child.returncode:
    raise Problem(f"{what} failed (exit status {child.returncode}):\n" + "\n".join("  " + line[:300] for line in tail) + f"\n{remedy}")
  if (took := time.monotonic() - start) > 2: say(f"{what}: done in {took:.0f} s")

NETWORK = "If this machine has no network: run the same command once where it has, or give pip a local source (PIP_FIND_LINKS, PIP_INDEX_URL)."

MUSL = ("this Python is built for musl (postmarketOS, Alpine), for which there is no Mesa compiler (tinymesa): run this in a glibc container or "
        "chroot (Debian, Arch) that has the GPU's node, /dev/dri")

def venv() -> None:
  """Creates or updates .venv. Incremental over the hash of the requirement files; an interrupted first install starts again from nothing."""
  want = digest(REQUIREMENTS, NODEPS, salt=sys.version.split()[0])
  stamp = VENV / "requirements.sha256"
  if stamp.is_file() and stamp.read_text() == want: return
  with locked("set-up"):
    if stamp.is_file() and stamp.read_text() == want: return
    if any("musl" in str(sysconfig.get_config_var(name)) for name in ("SOABI", "HOST_GNU_TYPE")): raise Problem(MUSL)
    fresh = not stamp.is_file() or not PYTHON.exists()
    stamp.unlink(missing_ok=True)
    if fresh:
      run_step("creating .venv", [sys.executable, "-m", "venv", "--clear", VENV], "Install the venv module of this Python (Debian: python3-venv).")
    pip: list[str | os.PathLike[str]] = [PYTHON, "-m", "pip", "install", "--progress-bar=off", "--disable-pip-version-check", "--require-hashes"]
    run_step("installing pinned requirements (about 350 MB, cached by pip)", [*pip, "-r", REQUIREMENTS], NETWORK)
    run_step("installing model files", [*pip, "--no-deps", "-r", NODEPS], NETWORK)
    stamp.write_text(want)

def base_version() -> str:
  """Version of the unmodified tinygrad named in base.txt."""
  return next(line for line in BASE.read_text().splitlines() if line.startswith("tinygrad==")).split("==")[1].split()[0]

def base_archives(python: str | os.PathLike[str] = PYTHON) -> tuple[pathlib.Path, pathlib.Path]:
  """(sdist, wheel) of the unmodified tinygrad, downloaded by version and sha256 with `python`'s pip if not there yet."""
  sdist, wheel = DOWNLOADS / f"tinygrad-{base_version()}.tar.gz", DOWNLOADS / f"tinygrad-{base_version()}-py3-none-any.whl"
  for path, kind in ((sdist, ["--no-binary", ":all:", "--no-build-isolation"]), (wheel, ["--only-binary", ":all:"])):
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() in BASE.read_text(): continue
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    run_step(f"downloading {path.name}",
             [python, "-m", "pip", "download", "--progress-bar=off", "--disable-pip-version-check", "--no-deps", "--require-hashes", *kind,
              "-r", BASE, "-d", DOWNLOADS], NETWORK)
    if not path.is_file(): raise Problem(f"pip did not leave {path.name} in build/dl; remove that folder and try again")
  return sdist, wheel

def clang_works(clang: str) -> bool:
  """Whether `clang` compiles C the way tinygrad's CPU device asks it to."""
  target = {"x86_64": "x86_64", "AMD64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
  flags = ["-c", "-x", "c", "-O2", "-fPIC", "-ffreestanding", "-nostdlib", f"--target={target}-none-unknown-elf", "-", "-o", os.devnull]
  try: return subprocess.run([clang, *flags], input=b"float f(float x) { return x * 2; }", capture_output=True, timeout=60).returncode == 0
  except (OSError, subprocess.TimeoutExpired): return False

def clang() -> str:
  """The C compiler for tinygrad's CPU device: CC if set and usable, else `clang` on PATH, else the one in .venv. Raises Problem if none works, and
  for a CC that is no program. The choice is linked as build/bin/clang; a compiler that the link already names is not tried again."""
  link = BUILD / "bin" / "clang"
  if (cc := os.environ.get("CC")) and shutil.which(cc) is None:
    raise Problem(f"CC={cc} is no program on PATH and no path of one. Set CC to a clang, without options, or unset it")
  names = [os.environ.get("CC"), "clang", *map(str, sorted((VENV / "bin").glob("clang-[0-9]*"), reverse=True))]
  for path in filter(None, (shutil.which(name) for name in names if name)):
    if path == str(link): continue
    if not (known := link.is_symlink() and os.readlink(link) == path) and not clang_works(path): continue
    if cc and path != shutil.which(cc): say(f"CC={cc} does not compile as tinygrad's CPU device needs it, {path} is used instead")
    if not known:
      with written_whole(link) as part: part.symlink_to(path)
    return path
  raise Problem(f"no C compiler for tinygrad's CPU device (tried: {', '.join(n for n in names if n)}). Install clang, or set CC to one that works.")

def environment(extra: Mapping[str, str] | None = None, tree: pathlib.Path = TREE, compiler: bool = True) -> dict[str, str]:
  """What `dev run` and `dev test` add to the user's environment: the built tree first on PYTHONPATH, the chosen compiler, .venv/bin on PATH, and
  the LLVM library of .venv, since whatever LLVM the system has may be too old for tinygrad (LLVM 15 refuses its untyped pointers). Bytecode is
  kept below build/ even where the user's environment keeps none: tinygrad's bindings take a second to compile, in each of many processes.
  Without `compiler`, a missing one is left for the command to report."""
  env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
  env["PYTHONPYCACHEPREFIX"] = str(BUILD / "pycache")
  env["PYTHONPATH"] = os.pathsep.join([str(tree), *filter(None, [env.get("PYTHONPATH")])])
  try: env["CC"] = clang()
  except Problem:
    if compiler: raise
  for name in ("LLVM_PATH", "MESA_PATH"): # tinygrad looks elsewhere, without a word, for a library that is not there
    if (path := env.get(name)) and not os.path.isfile(path): raise Problem(f"{name}={path} is no file. Set it to the library, or unset it")
  if (llvm := VENV / "lib" / "libLLVM.so").exists(): env.setdefault("LLVM_PATH", str(llvm))
  env["PATH"] = os.pathsep.join([str(VENV / "bin"), env.get("PATH", os.defpath), str(BUILD / "bin")])
  env["VIRTUAL_ENV"] = str(VENV)
  env.update(extra or {})
  return env
