"""What the unmodified tinygrad 0.14.0 imports once DEV's interface part starts with MOCK: its QCOM driver then runs on the KGSL model.

    PYTHONPATH=<this repository>/test/virtual/pristine:<unpacked 0.14.0 wheel> DEV=MOCK+QCOM:IR3 python script.py

QCOM_MOCK configures the machine as usual. Findings that this driver is known for are tolerated, and idle_timer reads as if its owner had followed
the driver's advice for PROFILE=1 (it cannot set the file without root).
"""
from test.mockgpu.qcom import MockFileIOInterface, configure
from test.mockgpu.qcom.gpu import TINYGRAD_0_14, Strict

configure(strict=Strict(lenient=TINYGRAD_0_14), sysfs={"idle_timer": "4294967276"})

__all__ = ["MockFileIOInterface"]
