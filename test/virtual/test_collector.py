"""Garbage of the client is not collected where hardware or a kernel is at work: its finalizers may wait for just that."""
import gc, threading, time
import pytest
from test.mockgpu.qcom.gpu import Job, VirtualGPU
from test.virtual.kernel_client import READ, Msm, boot

class Cycle:
  """Only a collection frees it; `ran` gets the thread that did."""
  def __init__(self, ran, then=lambda: None): self.me, self.ran, self.then = self, ran, then
  def __del__(self):
    self.ran.append(threading.get_ident())
    self.then()

@pytest.fixture
def gpu():
  gpu = VirtualGPU()
  yield gpu
  gpu.close()

@pytest.mark.parametrize("collect", (gc.collect, lambda: [[] for _ in range(100_000)]), ids=("asked for", "by allocations"))
def test_not_on_the_gpu_thread(gpu, collect):
  gc.collect()
  ran = []
  lock = threading.Lock()
  def free():
    with lock: pass
  job = Job(gpu.new_space(), [], on_start=lambda _: collect())
  Cycle(ran, free)
  with lock:               # the client waits with a lock that its own finalizers take
    gpu.submit(job)
    assert job.wait(5)
  assert not ran and not gc.get_freeze_count()
  gc.collect()
  assert ran == [threading.get_ident()]

def test_not_inside_an_ioctl():
  ran, inside = [], []
  def clock():             # CPU_PREP asks for the time
    gc.collect()
    inside.append(list(ran))
    return time.monotonic_ns()
  machine, _ = boot(clock=clock)
  msm = Msm()
  bo = msm.new()
  gc.collect()
  Cycle(ran)
  inside.clear()
  msm.prep(bo, READ)
  assert inside and not any(inside) and not gc.get_freeze_count()
  gc.collect()
  assert ran
  msm.close()
  machine.close()
