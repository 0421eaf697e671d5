import pathlib
__path__.append(str(pathlib.Path(__file__).parents[4] / "mockgpu"))
