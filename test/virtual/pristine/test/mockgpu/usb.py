"""tinygrad 0.14.0 imports this name together with mockgpu; no USB device exists here."""

class MockUSB3:
  def __init__(self, *args: object, **kwargs: object): raise RuntimeError("no mock USB device in this tree; QCOM's virtual GPU does not use one")
