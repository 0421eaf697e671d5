import os, pathlib, signal, subprocess, sys, tempfile, unittest

# a renderer which ends its process on kernels with an EXP2. In a module of its own: workers import it by name
DEADLY = """
import os, signal
from tinygrad import Tensor, Device
from tinygrad.runtime.ops_null import NullRenderer
from tinygrad.uop.ops import Ops
class DeadlyRenderer(NullRenderer):
  def render(self, uops):
    if any(u.op is Ops.EXP2 for u in uops): exec(os.environ["DEATH"])
    return super().render(uops)
def attempt(*kernels):
  Device["NULL"].renderers = [DeadlyRenderer]
  try: Tensor.realize(*kernels)
  except RuntimeError as e: print("error:", e)
"""

class TestWorkerDeath(unittest.TestCase):
  def run_deadly(self, script:str, death:str="os.abort()", **env) -> str:
    with tempfile.TemporaryDirectory() as d:
      (pathlib.Path(d)/"deadly.py").write_text(DEADLY)
      path = os.pathsep.join([d, *[p for p in sys.path if p]])
      # its own process group, so that a parent which waits forever can be removed together with its workers
      with subprocess.Popen([sys.executable, "-c", "from deadly import *\na, b = Tensor.empty(16), Tensor.empty(17)\n"+script], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                            env={**os.environ, "PYTHONPATH":path, "DEV":"NULL", "CCACHE":"0", "PARALLEL":"2", "DEATH":death, **env}) as proc:
        try: out, err = proc.communicate(timeout=40)
        except subprocess.TimeoutExpired:
          os.killpg(proc.pid, signal.SIGKILL)
          self.fail("the parent waits forever for a dead worker")
      self.assertEqual(proc.returncode, 0, err)
      return out

  def check_death(self, death:str, named:str, **env):
    out = self.run_deadly("attempt(a+1, a.exp2(), b*2)\nattempt(a+3, b+3)\nprint('recovered')", death, **env)
    self.assertEqual(out.count("error:"), 1)
    for w in (named, "PARALLEL=0"): self.assertIn(w, out)
    self.assertIn("recovered", out)

  def test_abort(self): self.check_death("os.abort()", "SIGABRT")
  def test_out_of_memory_kill(self): self.check_death("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL")
  def test_exit(self): self.check_death("os._exit(3)", "exit code 3")

  def test_beam(self):
    out = self.run_deadly("attempt(Tensor.empty(64, 64).exp2())\nattempt(Tensor.empty(64, 64).sqrt())\nprint('recovered')",
                          BEAM="1", IGNORE_BEAM_CACHE="1")
    self.assertIn("SIGABRT", out)
    self.assertIn("recovered", out)

  def test_idle_workers_killed(self):
    # nothing was lost: the next kernels compile. A worker killed in its wait for a task holds the lock of the task queue
    out = self.run_deadly("""import time
from tinygrad.engine import worker
attempt(a+1, b+1)
for p in list(worker.worker_pool._pool): os.kill(p.pid, signal.SIGKILL)
time.sleep(0.5)
attempt(a+2, b+2)
print('recovered')""")
    self.assertNotIn("error:", out)
    self.assertIn("recovered", out)

  def test_worker_exception_is_not_a_death(self):
    self.assertIn("error: from the renderer", self.run_deadly("attempt(a+1, a.exp2(), b*2)", "raise RuntimeError('from the renderer')"))

if __name__ == "__main__": unittest.main()
